from __future__ import annotations

import pytest

from roost.errors import InvalidConfigError
from roost.types import MAX_ELEMENTS, TensorKind, TensorRecord, TensorSpec


def make(kind: type, dtype: str, shape: tuple[int, ...]) -> TensorSpec | TensorRecord:
    if kind is TensorSpec:
        return TensorSpec(name="w", dtype=dtype, shape=shape)
    return TensorRecord(name="w", dtype=dtype, shape=shape, kind=TensorKind.PARAMETER, trainable=True)


@pytest.mark.parametrize("kind", [TensorSpec, TensorRecord])
@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        ("complex64", (1,), "dtype 'complex64' is not one of"),
        ("float32", (2**62,) * 100_000, "100000 dimensions, at most 16"),
        ("float32", (2, -1), "negative size"),
        ("float32", (0, -1), "negative size"),
        ("float32", (MAX_ELEMENTS, 2), "is too large"),
        ("float32", (2**62,) * 16, "is too large"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(kind: type, dtype: str, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=reason):
        make(kind, dtype, shape)


@pytest.mark.parametrize("kind", [TensorSpec, TensorRecord])
@pytest.mark.parametrize(("shape", "nbytes"), [((), 4), ((MAX_ELEMENTS,), 4 * MAX_ELEMENTS), ((2**50, 0), 0), ((2, 3), 24)])
def test_a_tensor_of_any_possible_shape_is_taken(kind: type, shape: tuple[int, ...], nbytes: int) -> None:
    assert make(kind, "float32", shape).nbytes == nbytes
