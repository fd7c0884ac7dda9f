"""Makes recorded tensors, each alone: runs what they depend on, with the random numbers an eager build would have drawn."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from roost.errors import DeferredInitError
from roost.weights.drawing import depends_on_values, elements, fixed_draws, passed_over, refs_of, run_random
from roost.weights.tape import GeneratorMove, RecordedOp, Tape, TensorRef, elements_of, transformed
from roost.weights.twister import skip

Storages = dict[int, torch.UntypedStorage]

KEPT_FROM = 2**18
"""Elements drawn after which the generator's state (5 kB) is remembered: drawing fewer again takes a millisecond."""

_DEFAULT_DTYPE = threading.Lock()
"""Held while torch's default dtype is another than the user's."""


class Replay:
    """The tensors of one tape. Several threads may ask at once."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._lock = threading.RLock()
        self._states = {0: tape.start}
        self._known = [0]
        self._latest = (0, tape.start)

    def tensors(self, refs: Sequence[TensorRef], *, before: int | None = None) -> list[Tensor]:
        """Return what `refs` hold after all entries of the tape, or just before entry `before`, as CPU tensors.

        Tensors that share a storage share it in the result. Holds in memory the tensors asked for, what their operations need at
        one time, and nothing of other tensors. Raises DeferredInitError if torch makes another tensor than it announced.
        """
        stop = len(self.tape.entries) if before is None else before
        with torch.no_grad():
            storages = self._run({ref.storage for ref in refs}, stop)
            return [ref.over(storages[ref.storage]) for ref in refs]

    def state_before(self, index: int) -> Tensor:
        """Return the generator's state before entry `index`, walking from the nearest known one."""
        with self._lock:
            start = self._known[bisect_right(self._known, index) - 1]
            state = self._states[start]
            if start < self._latest[0] <= index:
                start, state = self._latest
            pending, passed = 0, 0
            for position in self.tape.draws_between(start, index):
                entry = self.tape.entries[position]
                known = None if isinstance(entry, GeneratorMove) else fixed_draws(entry)
                if known is not None:
                    # Jumping costs the same for any distance: once for a whole run of such entries.
                    pending += known
                    passed += known
                    continue
                state, pending = (skip(state, pending) if pending else state), 0
                state = self._after(position, state)
                size = elements(entry)
                passed += size
                self._remember(position + 1, state, passed=size)
            state = skip(state, pending) if pending else state
            self._remember(index, state, passed=passed)
            return state

    def _after(self, position: int, state: Tensor) -> Tensor:
        entry = self.tape.entries[position]
        if isinstance(entry, GeneratorMove):
            return entry.state if entry.state is not None else self.state_before(entry.position)
        if not depends_on_values(entry):
            return passed_over(entry, state)
        storages = self._run({ref.storage for ref in refs_of(entry)}, position)
        return run_random(entry.call, *_filled(entry, storages, self.tape), state)[1]

    def _remember(self, index: int, state: Tensor, *, passed: int) -> None:
        with self._lock:
            self._latest = (index, state)
            if passed >= KEPT_FROM and index not in self._states:
                self._states[index] = state
                insort(self._known, index)

    def _run(self, wanted: set[int], before: int) -> Storages:
        chosen = self._slice(wanted, before)
        last_use = {storage: index for index, entry in chosen for storage in entry.reads | entry.writes}
        storages: Storages = {}
        for index, entry in chosen:
            self._execute(index, entry, storages)
            for storage in entry.reads | entry.writes:
                if last_use[storage] == index and storage not in wanted:
                    storages.pop(storage, None)
        return storages

    def _slice(self, wanted: set[int], before: int) -> list[tuple[int, RecordedOp]]:
        """Return the entries before `before` that the contents of `wanted` depend on, in order."""
        needed, chosen = set(wanted), []
        for index in range(before - 1, -1, -1):
            entry = self.tape.entries[index]
            if isinstance(entry, GeneratorMove) or needed.isdisjoint(entry.writes):
                continue
            chosen.append((index, entry))
            needed -= entry.replaces
            needed |= entry.reads
            if not needed:
                break
        return chosen[::-1]

    def _execute(self, index: int, entry: RecordedOp, storages: Storages) -> None:
        args, kwargs = _filled(entry, storages, self.tape)
        if entry.random:
            result, after = run_random(entry.call, args, kwargs, self.state_before(index))
            self._remember(index + 1, after, passed=elements(entry))
        else:
            with _default_dtype(entry.float_default):
                result = entry.call(*args, **kwargs)
        given = {value.untyped_storage()._cdata for value in elements_of(args, tuple(kwargs.values())) if isinstance(value, Tensor)}
        results = list(elements_of(result))
        for position, ref in entry.outputs:
            storages[ref.storage] = _laid_out(results[position], ref, given, entry)


def _filled(entry: RecordedOp, storages: Storages, tape: Tape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `entry` with real tensors; a storage that it overwrites whole is made here if it is not there."""

    def real(value: Any) -> Any:
        if not isinstance(value, TensorRef):
            return value
        storage = storages.get(value.storage)
        if storage is None:
            storage = torch.UntypedStorage(tape.storages[value.storage].nbytes())
            storages[value.storage] = storage
        return value.over(storage)

    args = tuple(transformed(value, real) for value in entry.args)
    return args, {name: transformed(value, real) for name, value in entry.kwargs.items()}


def _laid_out(result: Tensor, ref: TensorRef, given: set[int], entry: RecordedOp) -> torch.UntypedStorage:
    """Return the storage of `result`, laid out in memory as `ref` says."""
    if result.dtype is not ref.dtype or tuple(result.shape) != ref.shape:
        raise DeferredInitError(
            f"{entry.call} gave {result.dtype} {list(result.shape)} where {ref.dtype} {list(ref.shape)} had been announced",
            hint="Build the part of the model that calls it before roost.deferred_init(), and report this as a bug.",
        )
    same = tuple(result.stride()) == ref.stride and result.storage_offset() == ref.offset
    if same and result.untyped_storage()._cdata not in given:
        return result.untyped_storage()
    return ref.scratch().copy_(result).untyped_storage()


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make `dtype` torch's default for a moment, where a result depends on it."""
    if dtype is None or dtype is torch.get_default_dtype():
        yield
        return
    with _DEFAULT_DTYPE:
        kept = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(kept)
