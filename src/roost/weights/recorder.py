"""Turns everything that is built on the CPU in one thread into meta tensors, and records how each would have been made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roost.errors import DeferredInitError
from roost.weights.drawing import run_random
from roost.weights.operations import (
    CPU,
    answers_by_values,
    as_refs,
    constant_of,
    entry_of,
    is_factory,
    is_random,
    user_place,
    without_generator,
    written_by,
)
from roost.weights.replay import Replay
from roost.weights.tape import GeneratorMove, RecordedOp, Tape, elements_of, transformed

META = torch.device("meta")

_MARK = 0x0DEFE44ED0000000
"""Seeds from here on mark places of the tape while a block records; no number is ever drawn from them."""


class Recorder:
    """Records one block. The modes of roost.weights.modes show it every call and every operation."""

    def __init__(self, tape: Tape, replay: Replay) -> None:
        self.tape = tape
        self.replay = replay
        self.paused = False
        """True while recorded tensors are made: what runs then is not part of the block."""
        self._marks: dict[bytes, int] = {}
        self._mark = b""

    @contextmanager
    def generator_marked(self) -> Iterator[None]:
        """Keep marks in torch's CPU generator inside, and give it back its state at the end."""
        kept = torch.default_generator.get_state()
        try:
            self._set_mark()
            yield
        finally:
            torch.default_generator.set_state(kept)

    def is_recorded(self, value: Any) -> bool:
        """Return whether `value` is a tensor that this block makes."""
        return isinstance(value, Tensor) and self.tape.number_of(value) is not None

    def real(self, value: Any) -> Any:
        """Return `value` with every recorded tensor in it replaced by a CPU tensor of what it holds now."""
        recorded = [item for item in elements_of(value) if self.is_recorded(item)]
        refs = [ref for ref in map(self.tape.ref, recorded) if ref is not None]
        if not refs:
            return value
        with self._pause():
            made = dict(zip(map(id, recorded), self.replay.tensors(refs), strict=True))
        return transformed(value, lambda item: made.get(id(item), item))

    def truncated_normal(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return torch's truncated normal initialiser, recorded as one call.

        It draws until no number is out of its bounds. Recorded operation by operation, every one of its decisions would make the
        tensor at once.
        """

        def recorded(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None) -> Tensor:
            ref = self.tape.ref(tensor)
            if self.paused or ref is None or generator is not None:
                return original(tensor, mean, std, a, b, generator=generator)
            self._follow_generator()
            whole = frozenset({ref.storage}) if self.tape.covers(ref) else frozenset()
            storages = frozenset({ref.storage})
            self._append(
                RecordedOp(
                    call=original,
                    args=(ref, mean, std, a, b),
                    kwargs={},
                    outputs=(),
                    reads=storages - whole,
                    writes=storages,
                    replaces=whole,
                    random=True,
                )
            )
            return tensor

        return recorded

    def operation(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation: on the meta device and recorded, or at once if it works on real data alone.

        Raises DeferredInitError, naming the user's line, for what cannot be recorded.
        """
        tensors = [item for item in elements_of(args, tuple(kwargs.values())) if isinstance(item, Tensor)]
        if is_random(func):
            kwargs = without_generator(args, kwargs)
        on_meta = any(item.device.type == "meta" for item in tensors)
        device = "" if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if device not in ("", "cpu", "meta"):
            if on_meta:
                raise DeferredInitError(f"a recorded tensor would go to {device}{user_place()}", hint="Move it after the block.")
            return func(*args, **kwargs)
        if not on_meta and device != "meta" and (tensors or not is_factory(func)):
            return self._at_once(func, args, kwargs) if is_random(func) else func(*args, **kwargs)
        into_data = any(item.device.type == "cpu" for item in written_by(func, args, kwargs))
        if on_meta and (into_data or answers_by_values(func, args)):
            return self._at_once(func, args, kwargs)
        return self._record(func, args, kwargs, factory=not tensors)

    def _at_once(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation whose result is needed now, with the random numbers an eager build would draw here."""
        args = self.real(args)
        kwargs = {name: CPU if name == "device" and value is not None else self.real(value) for name, value in kwargs.items()}
        if not is_random(func):
            return func(*args, **kwargs)
        self._follow_generator()
        with self._pause():
            result, after = run_random(func, args, kwargs, self.replay.state_before(len(self.tape.entries)))
        self._append(GeneratorMove(state=after))
        return result

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, factory: bool) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if factory or kwargs.get("device") is not None:
            kwargs["device"] = META
        original = (args, kwargs)
        args = tuple(transformed(value, self._twin) for value in args)
        kwargs = {name: transformed(value, self._twin) for name, value in kwargs.items()}
        tensors = [item for item in elements_of(args, tuple(kwargs.values())) if isinstance(item, Tensor)]
        refs = {id(item): ref for item in tensors if (ref := self.tape.ref(item)) is not None}
        sizes = {ref.storage: self.tape.storages[ref.storage].nbytes() for ref in refs.values()}
        written = written_by(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            if written:
                raise DeferredInitError(f"{func} cannot be recorded{user_place()}: {error}") from error
            return self._at_once(func, *original)
        if any(self.tape.storages[number].nbytes() != size for number, size in sizes.items()):
            raise DeferredInitError(f"{func} changes the size of a tensor{user_place()}", hint="Make it with the right size at once.")
        if torch.Tag.inplace_view in func.tags or (not written and _only_views(result, tensors)):
            return result
        if len(refs) < len({id(item) for item in tensors}):
            raise DeferredInitError(
                f"{func} takes a meta tensor that was not made in this block{user_place()}",
                hint="Build the whole model inside one roost.deferred_init() block.",
            )
        if is_random(func):
            self._follow_generator()
        named = {name: as_refs(value, refs) for name, value in kwargs.items()}
        entry = entry_of(self.tape, func, as_refs(args, refs), named, [refs[id(item)] for item in written], result)
        if entry is not None:
            self._append(entry)
        return result

    def _twin(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "meta":
            return constant_of(self.tape, value)
        return value

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _append(self, entry: RecordedOp | GeneratorMove) -> None:
        self.tape.append(entry)
        if isinstance(entry, GeneratorMove) or entry.random:
            self._set_mark()

    def _set_mark(self) -> None:
        """Put the generator in a state that stands for 'after all entries so far'."""
        position = len(self.tape.entries)
        torch.default_generator.manual_seed(_MARK + position)
        self._mark = _digest(torch.default_generator.get_state())
        self._marks[self._mark] = position

    def _follow_generator(self) -> None:
        """Record it if the user has set the generator since the last draw: to a seed, or back to where it was."""
        state = torch.default_generator.get_state()
        digest = _digest(state)
        if digest == self._mark:
            return
        position = self._marks.get(digest)
        self._append(GeneratorMove(state=state) if position is None else GeneratorMove(position=position))


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def _only_views(result: Any, tensors: list[Tensor]) -> bool:
    given = {item.untyped_storage()._cdata for item in tensors}
    made = [item for item in elements_of(result) if isinstance(item, Tensor)]
    return bool(made) and all(item.layout is torch.strided and item.untyped_storage()._cdata in given for item in made)
