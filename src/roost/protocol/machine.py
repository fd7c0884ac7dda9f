"""The base of every state machine: a literal transition table, the current state, and the last moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from roost.errors import IllegalTransitionError

HISTORY_LENGTH = 16
"""Moves that are kept for error messages."""

State = TypeVar("State", bound=StrEnum)


class StateMachine(Generic[State]):
    """The state of one machine; `table[state][type of event]` is the next state, or a tuple of those allowed.

    The machine itself does nothing else: its owner reads the event, decides, and calls `move`.
    """

    def __init__(self, name: str, initial: State, table: Mapping[State, Mapping[type[object], State | tuple[State, ...]]]) -> None:
        self._name = name
        self._state = initial
        self._table = table
        self._history: deque[str] = deque(maxlen=HISTORY_LENGTH)

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    @property
    def history(self) -> tuple[str, ...]:
        """The last moves, oldest first, as 'STATE -- EVENT -> STATE'."""
        return tuple(self._history)

    def allowed(self, event: object) -> tuple[State, ...]:
        """Return the states `event` may lead to from here. Raises IllegalTransitionError if there is none."""
        found = self._table.get(self._state, {}).get(type(event))
        if found is None:
            raise self._illegal(event, f"got {type(event).__name__}, which state {self._state} does not allow")
        return found if isinstance(found, tuple) else (found,)

    def move(self, event: object, to: State | None = None) -> State:
        """Go to state `to` because of `event`, and return it; without `to` the table must name exactly one state.

        Raises IllegalTransitionError, with the recent history, if the table does not allow that.
        """
        choices = self.allowed(event)
        if to is None and len(choices) != 1:
            raise self._illegal(
                event, f"{type(event).__name__} may lead from {self._state} to any of {', '.join(choices)}; none was chosen"
            )
        target = choices[0] if to is None else to
        if target not in choices:
            raise self._illegal(event, f"{type(event).__name__} must not lead from {self._state} to {target}")
        self._history.append(f"{self._state} -- {type(event).__name__} -> {target}")
        self._state = target
        return target

    def _illegal(self, event: object, what: str) -> IllegalTransitionError:
        return IllegalTransitionError(f"{self._name}: {what} ({event!r})", history=self.history)
