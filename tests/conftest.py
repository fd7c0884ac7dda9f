from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported: stages compute with one thread here, and what they compute is compared bit by bit with plain loops.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _measure_models_briefly() -> Iterator[None]:
    """Costs that a test's plan is made of need not be exact: a job is measured in a fraction of a second."""
    from roost.capture import profiling

    patch = pytest.MonkeyPatch()
    patch.setattr(profiling, "BUDGET_S", 0.0)
    patch.setattr(profiling, "MIN_REPEATS", 1)
    patch.setattr(profiling, "CACHE_BYTES", 1 << 10)
    yield
    patch.undo()
