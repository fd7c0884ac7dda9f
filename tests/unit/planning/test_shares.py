"""Data shares."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.planning.shares import data_shares


def test_shares_are_in_proportion_to_speed() -> None:
    assert data_shares([30.0, 10.0]) == pytest.approx((0.75, 0.25))


@given(rates=st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=50))
def test_shares_add_up_to_one(rates: list[float]) -> None:
    assert math.fsum(data_shares(rates)) == pytest.approx(1.0, abs=1e-12)
