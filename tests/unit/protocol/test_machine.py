"""The base of the state machines."""

from __future__ import annotations

from enum import StrEnum

import pytest

from roost.errors import IllegalTransitionError
from roost.protocol.machine import HISTORY_LENGTH, StateMachine


class Light(StrEnum):
    RED = "red"
    GREEN = "green"
    OFF = "off"


class Switched:
    pass


class Broken:
    pass


TABLE: dict[Light, dict[type[object], Light | tuple[Light, ...]]] = {
    Light.RED: {Switched: Light.GREEN, Broken: (Light.OFF, Light.RED)},
    Light.GREEN: {Switched: Light.RED},
}


def make() -> StateMachine[Light]:
    return StateMachine("light", Light.RED, TABLE)


def test_a_single_next_state_is_taken_without_naming_it() -> None:
    machine = make()
    assert machine.move(Switched()) is Light.GREEN
    assert machine.state is Light.GREEN
    assert machine.history == ("red -- Switched -> green",)


def test_one_of_several_next_states_must_be_named() -> None:
    machine = make()
    with pytest.raises(IllegalTransitionError, match="none was chosen"):
        machine.move(Broken())
    assert machine.move(Broken(), Light.OFF) is Light.OFF


def test_an_event_the_state_does_not_allow_raises_with_the_history() -> None:
    machine = make()
    machine.move(Switched())
    with pytest.raises(IllegalTransitionError, match=r"(?s)state green does not allow.*red -- Switched -> green") as caught:
        machine.move(Broken())
    assert caught.value.history == ("red -- Switched -> green",)
    assert machine.state is Light.GREEN


def test_a_next_state_the_table_lacks_raises_and_nothing_moves() -> None:
    machine = make()
    with pytest.raises(IllegalTransitionError, match="must not lead from red to off"):
        machine.move(Switched(), Light.OFF)
    assert machine.state is Light.RED


def test_history_keeps_only_the_last_moves() -> None:
    machine = make()
    for _ in range(50):
        machine.move(Switched())
    assert len(machine.history) == HISTORY_LENGTH
