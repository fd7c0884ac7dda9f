"""An asyncio event loop whose time is virtual: it jumps to the next timer when nothing is ready, and nothing runs beside it.

Every callback belongs to a machine (or to none: the network, the test). A machine has clocks of its own, can be frozen, and can be
killed after any callback: then whatever it still had to do is not done.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

EPOCH_S = 1_700_000_000.0
"""Unix time at virtual time 0."""
TIMER_S = 1e-9
"""Timers fire so much late, never early: what is converted between clocks is rounded."""
MOST_STILL = 100_000
"""Callbacks that may run while time stands still."""
MOST_CLEANING = 20_000
"""Turns of the loop in which cancelled tasks must come to their ends."""


class VirtualMachine:
    """Where a process runs: what is created in its context stops when it is frozen, and for ever when it is killed."""

    def __init__(self, name: str, *, offset_s: float = 0.0, rate: float = 1.0, step_s: tuple[float, float] = (1e-4, 1e-3)) -> None:
        """Its monotonic clock shows `offset_s + rate x virtual time`; work off the event loop takes between `step_s` seconds."""
        self.name = name
        self.offset_s = offset_s
        self.rate = rate
        self.wall_offset_s = 0.0
        self.step_s = step_s
        self.frozen = False
        self.dead = False
        self.doomed: int | None = None
        """It dies before it has run so many more callbacks."""
        self.held: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(CURRENT.set, self)

    def local(self, now: float) -> float:
        """Return what its monotonic clock shows at virtual time `now`."""
        return self.offset_s + self.rate * now

    def universal(self, shown: float) -> float:
        """Return the virtual time at which its monotonic clock shows `shown`."""
        return (shown - self.offset_s) / self.rate


CURRENT: contextvars.ContextVar[VirtualMachine | None] = contextvars.ContextVar("machine", default=None)


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in sets does not depend on its address, so that it is the same in every run."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class DeadlockError(AssertionError):
    """Nothing is left that could ever happen, or time stands still."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their virtual time; work for threads runs inline and takes virtual time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.on_death: Callable[[VirtualMachine], None] = lambda machine: None
        self.failures: list[dict[str, Any]] = []
        self._rng = rng
        self._still = 0
        self.cleaning = False
        """The run is over: what is left only comes to its end."""
        self._free_at: dict[int, float] = {}
        self._executors: list[Any] = []
        self._numbers = itertools.count()
        self._tasks: list[NumberedTask] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    # ------------------------------------------------------------ clocks

    def time(self) -> float:
        machine = CURRENT.get()
        return self.now if machine is None else machine.local(self.now)

    def wall_time(self) -> float:
        """Return the Unix time that the current machine shows."""
        machine = CURRENT.get()
        return EPOCH_S + self.now + (machine.wall_offset_s if machine is not None else 0.0)

    @property
    def current_machine(self) -> str:
        """The name of the machine that runs now."""
        machine = CURRENT.get()
        return machine.name if machine is not None else "-"

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.TimerHandle:
        machine = CURRENT.get() if context is None else context.get(CURRENT)
        due = when if machine is None else machine.universal(when) + TIMER_S
        return super().call_at(due, callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.TimerHandle:
        machine = CURRENT.get() if context is None else context.get(CURRENT)
        now = self.now if machine is None else machine.local(self.now)
        return self.call_at(now + delay, callback, *args, context=context)

    def after(self, delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        """Call `callback` after so many virtual seconds, as nobody's."""
        return self.call_later(delay, callback, *args, context=NOBODY)

    # ------------------------------------------------------------ machines

    def run_on(self, machine: VirtualMachine, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Return a task of `machine` that does `work`."""
        return self.create_task(work, context=machine.context.copy())

    def thaw(self, machine: VirtualMachine) -> None:
        """Let a frozen machine go on where it was."""
        machine.frozen = False
        held, machine.held = machine.held, []
        self._ready.extend(held)

    def _make_task(self, loop: Any, coro: Any, context: contextvars.Context | None = None) -> NumberedTask:
        task = NumberedTask(coro, number=next(self._numbers), loop=self, context=context)
        # Tasks are kept until the end: one that is dropped would run its `finally` whenever memory is cleaned up.
        self._tasks.append(task)
        return task

    # ------------------------------------------------------------ running

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready and (self._scheduled or not self.cleaning):
            if not self._scheduled:
                raise DeadlockError(f"nothing is left to happen at {self.now:.3f} s")
            if self._scheduled[0]._when > self.now:
                self.now = self._scheduled[0]._when
                self._still = 0
        while self._scheduled and self._scheduled[0]._when <= self.now:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle._cancelled and self._may_run(handle):
                self.steps += 1
                self._still += 1
                handle._run()
        if self._still > MOST_STILL:
            raise DeadlockError(f"time stands still at {self.now:.3f} s")

    def _may_run(self, handle: asyncio.Handle) -> bool:
        machine = handle._context.get(CURRENT)
        if machine is None or self.cleaning:
            return True
        if machine.doomed is not None and not machine.dead and not machine.frozen:
            machine.doomed -= 1
            if machine.doomed < 0:
                machine.dead = True
                self.on_death(machine)
        if machine.dead or machine.frozen:
            machine.held.append(handle)
            return False
        return True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they come up."""

    def _process_events(self, event_list: Any) -> None:
        """There are no sockets."""

    def clean_up(self, machines: list[VirtualMachine]) -> None:
        """Cancel every task, the dead ones' too, and let them end; what they do meanwhile reaches nobody."""
        self.cleaning = True
        for machine in machines:
            self._ready.extend(machine.held)
            machine.held = []
        for task in self._tasks:
            task._log_destroy_pending = False
            task.cancel()
        for _ in range(MOST_CLEANING):
            if all(task.done() for task in self._tasks) or not (self._ready or self._scheduled):
                break
            self._still = 0
            self.stop()
            self.run_forever()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()
        self._tasks.clear()
        self.close()

    # ------------------------------------------------------------ work for threads

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run `func` inline, at the beginning or the end of the time it takes; an executor does one thing after the other."""
        machine = CURRENT.get()
        shortest, longest = machine.step_s if machine is not None and executor is not None else (1e-5, 1e-3)
        began = self.now
        if executor is not None:
            if not any(known is executor for known in self._executors):
                self._executors.append(executor)
            began = max(began, self._free_at.get(id(executor), 0.0))
        ended = began + self._rng.uniform(shortest, longest)
        if executor is not None:
            self._free_at[id(executor)] = ended
        future = self.create_future()
        work = Work(func, args, future)
        context = contextvars.copy_context()
        if self._rng.random() < 0.5:
            self._at(began, work.perform, context)
        self._at(ended, work.report, context)
        return future

    def _at(self, when: float, callback: Callable[[], None], context: contextvars.Context) -> None:
        machine = context.get(CURRENT)
        self.call_at(when if machine is None else machine.local(when), callback, context=context)


class Work:
    """Something that a thread was given to do."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        self._func = func
        self._args = args
        self._future = future
        self._begun = False
        self._result: Any = None
        self._error: BaseException | None = None

    def perform(self) -> None:
        """Do it, unless it was cancelled before it was begun."""
        if self._begun or self._future.cancelled():
            return
        self._begun = True
        try:
            self._result = self._func(*self._args)
        except Exception as error:  # noqa: BLE001 - whoever waits for the thread gets it
            self._error = error

    def report(self) -> None:
        """Tell whoever waits; do it now if it was left to the end."""
        self.perform()
        if not self._begun or self._future.done():
            return
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)


NOBODY = contextvars.copy_context()


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop, rng: random.Random) -> Iterator[None]:
    """Let everything that asks for the time or for a secret while the context is open get the loop's, and the seed's."""

    def token_hex(nbytes: int | None = None) -> str:
        return rng.randbytes(32 if nbytes is None else nbytes).hex()

    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=rng.getrandbits(128), version=4)

    def sleep(seconds: float) -> None:
        raise AssertionError(f"a thread that computes sleeps {seconds} s: a simulated machine is never paced")

    with contextlib.ExitStack() as stack:
        for clock in ("monotonic", "perf_counter", "process_time", "thread_time"):
            stack.enter_context(mock.patch.object(time, clock, loop.time))
        stack.enter_context(mock.patch.object(time, "time", loop.wall_time))
        stack.enter_context(mock.patch.object(time, "sleep", sleep))
        stack.enter_context(mock.patch.object(secrets, "token_hex", token_hex))
        stack.enter_context(mock.patch.object(uuid, "uuid4", uuid4))
        yield
