"""While torch.export runs, makes raise what it would get silently wrong, with the user's line.

Nothing here sees another thread: each guard lets calls from other threads through.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from roost.capture.lines import called_from_torch, calling_line, is_users, line_of, users_frame
from roost.errors import NotCapturableError

_PYTHON_DRAWS = ("random", "randint", "uniform", "randrange", "choice", "choices", "sample", "shuffle", "gauss", "normalvariate")
_DRAW_HINT = "Draw with torch.rand or torch.randn: the job's seed then decides what is drawn."
_OWN_GRADIENT_HINT = "Gradients inside forward cannot be captured; write the loss so that one backward gives all of them."


@contextmanager
def refused_traps(assigned: list[str] | None = None) -> Iterator[None]:
    """Raise NotCapturableError, naming the line, at what torch.export would drop or bake in as a constant.

    These are custom autograd functions, hooks on gradients, gradients taken inside forward, inference_mode, seeding, buffers that
    are assigned anew, and random numbers of Python and numpy, as long as they are called by their module's name. `assigned` gets
    the lines where a module's plain attribute is assigned: what is kept there is lost, which may be meant.
    """
    with ExitStack() as stack:
        for owner, name, what, hint in _refused():
            stack.enter_context(_refused_call(owner, name, what, hint))
        stack.enter_context(_refused_functions())
        stack.enter_context(_refused_inference_mode())
        stack.enter_context(_refused_buffer_assignment([] if assigned is None else assigned))
        yield


def check_hooks(module: nn.Module, prefix: str) -> None:
    """Raise NotCapturableError if a parameter of `module` has a hook on its gradient: it would be lost. `prefix` is left out of names."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotCapturableError(
                f"parameter {name.removeprefix(prefix)!r} has a hook on its gradient, which would be lost",
                hint="Remove the hook; change the loss, or freeze the parameter, to the same effect.",
            )


def generator_states() -> dict[str, Any]:
    """Return the states of Python's and, if it is loaded, numpy's global generators, to be compared by `have_drawn`."""
    states: dict[str, Any] = {"random": random.getstate()}
    drawer = _numpy_drawer()
    if drawer is not None:
        kind, keys, *rest = drawer.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def have_drawn(before: Mapping[str, Any]) -> str:
    """Return the name of a generator that is no longer in the state it was in; empty if all are."""
    now = generator_states()
    return next((name for name, state in before.items() if now.get(name) != state), "")


@contextmanager
def kept_generator_states() -> Iterator[None]:
    """Put Python's and numpy's global generators back at the end."""
    state, drawer = random.getstate(), _numpy_drawer()
    numpy_state = None if drawer is None else drawer.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if drawer is not None:
            drawer.set_state(numpy_state)


def line_that_draws(run: Callable[[], object]) -> str:
    """Run and return ' at FILE:LINE: CODE' of the first line of the user's that changes Python's or numpy's global generator."""
    before, found, current = generator_states(), "", ""

    def in_users_code(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal found, current
        if not found and have_drawn(before):
            found = current
        # The rest of a line goes on after what it calls has returned.
        following = users_frame(frame.f_back) if event == "return" else frame
        current = line_of(following) if following is not None else ""
        return in_users_code

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return in_users_code if is_users(frame.f_code.co_filename) else None

    tracer = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(tracer)
    return found


def _numpy_drawer() -> Any:
    """Return the generator behind the functions of numpy.random; None while nobody has imported it."""
    return getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)


def _refused() -> Iterator[tuple[Any, str, str, str]]:
    """Yield (owner, attribute, what to say, what to do) of everything that must not be called."""
    for name in _PYTHON_DRAWS:
        yield random, name, f"random.{name} would become a constant", _DRAW_HINT
    module = sys.modules.get("numpy.random")
    if module is not None:
        drawer = _numpy_drawer()
        for name in ("default_rng", *module.__all__):
            item = getattr(module, name)
            if name == "default_rng" or (drawer is not None and getattr(item, "__self__", None) is drawer):
                yield module, name, f"numpy.random.{name} would become a constant", _DRAW_HINT
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield Tensor, name, f"a gradient hook ({name}) would be lost", "Change the loss to the same effect, or detach the tensor."
    for owner, name in ((torch.autograd, "grad"), (torch.autograd, "backward"), (Tensor, "backward")):
        yield owner, name, f"the forward computes gradients ({name})", _OWN_GRADIENT_HINT
    for owner in (torch, torch.random):
        yield owner, "manual_seed", "the forward seeds the generator, which would be lost", "Leave manual_seed out of the forward."


@contextmanager
def _refused_call(owner: Any, name: str, what: str, hint: str) -> Iterator[None]:
    thread = threading.get_ident()
    original = getattr(owner, name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or called_from_torch():
            return original(*args, **kwargs)
        raise NotCapturableError(f"{what}{calling_line()}", hint=hint)

    setattr(owner, name, refused)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _refused_functions() -> Iterator[None]:
    """Make every custom autograd.Function raise: export would keep its forward and lose its backward."""
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original.__get__(None, cls)(*args, **kwargs)
        raise NotCapturableError(
            f"the custom autograd function {cls.__qualname__} would lose its backward{calling_line()}",
            hint="Write it with ordinary torch operations, whose gradients are known.",
        )

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _refused_inference_mode() -> Iterator[None]:
    """Make torch.inference_mode raise: export follows no_grad, not this."""
    original = torch.inference_mode.__enter__
    thread = threading.get_ident()

    def enter(self: Any) -> None:
        if threading.get_ident() != thread or called_from_torch():
            return original(self)
        raise NotCapturableError(f"inference_mode would be lost{calling_line()}", hint="Use torch.no_grad instead.")

    torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = original  # type: ignore[method-assign]


@contextmanager
def _refused_buffer_assignment(assigned: list[str]) -> Iterator[None]:
    """Make the assignment of a new tensor to a buffer raise: export would keep the old one."""
    original = nn.Module.__setattr__
    thread = threading.get_ident()

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() == thread and not called_from_torch():
            known = self.__dict__.get("_buffers", {}).get(name)
            if known is not None and value is not known:
                raise NotCapturableError(
                    f"the buffer {name!r} is assigned anew, which would be lost{calling_line()}",
                    hint=f"Change it in place instead: self.{name}.copy_(...).",
                )
            assigned.append(calling_line())
        original(self, name, value)

    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Put the attributes of all modules back at the end: what a forward stores there would be tensors without values."""
    kept = [(part, dict(part.__dict__)) for part in module.modules()]
    # Hooks, too: a library that registers some at the first call notes that it has in a plain attribute.
    contents = [(item, dict(item)) for _, attributes in kept for item in attributes.values() if isinstance(item, dict)]
    try:
        yield
    finally:
        for part, attributes in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
        for item, content in contents:
            item.clear()
            item.update(content)


@contextmanager
def noted_data_uses() -> Iterator[list[str]]:
    """Yield a list that gets ' at FILE:LINE: CODE' of every use of `.data` by the user: where export fails, it says why."""
    original: Any = Tensor.data
    thread = threading.get_ident()
    lines: list[str] = []

    def note() -> None:
        if threading.get_ident() == thread and not called_from_torch():
            lines.append(calling_line())

    def get(self: Tensor) -> Tensor:
        note()
        found: Tensor = original.__get__(self)
        return found

    def put(self: Tensor, value: Tensor) -> None:
        note()
        original.__set__(self, value)

    Tensor.data = property(get, put)  # type: ignore[assignment]
    try:
        yield lines
    finally:
        # Tensor itself has none: the one of its base is found again.
        del Tensor.data
