"""What `roost chaos` is asked for."""

from __future__ import annotations

import pytest

from roost.chaos.schedule import FaultKind
from roost.cli.chaos import parse_kinds
from roost.errors import InvalidConfigError


def test_kinds_are_named_with_commas_and_none_means_all() -> None:
    assert parse_kinds(" kill, cut,") == (FaultKind.KILL, FaultKind.CUT)
    assert parse_kinds("") == tuple(FaultKind)


def test_a_kind_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidConfigError, match="earthquake is no kind of fault; there are kill, freeze"):
        parse_kinds("kill,earthquake")
