from __future__ import annotations

from pathlib import Path

import pytest

from roost.errors import IllegalTransitionError, RoostError, TokenExpiredError, all_error_types, error_from_code

DOCS = Path(__file__).parents[2] / "docs" / "errors.md"


def subclasses(kind: type[RoostError]) -> list[type[RoostError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in subclasses(child))]


def test_every_error_has_a_code_of_its_own() -> None:
    kinds = subclasses(RoostError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert set(all_error_types().values()) == set(kinds)


@pytest.mark.parametrize("kind", all_error_types().values(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_section_in_the_docs_with_its_hint(kind: type[RoostError]) -> None:
    text = DOCS.read_text()
    heading = f"## {kind.code} {kind.__name__}\n"
    assert heading in text
    section = text.split(heading)[1].split("\n## ")[0]
    if not kind.code.endswith("00"):
        assert kind.default_hint in section


def test_a_reported_error_comes_back_as_its_own_class() -> None:
    found = error_from_code("R402", "the token of node-1 is over", "get another")
    assert type(found) is TokenExpiredError
    assert str(found) == "[R402] the token of node-1 is over\n  What to do: get another"


def test_an_unknown_code_of_a_newer_peer_is_still_an_error() -> None:
    assert type(error_from_code("R999", "what", "hint")) is RoostError


def test_an_illegal_transition_shows_the_recent_history() -> None:
    error = IllegalTransitionError("job j: no", history=("a -- b -> c",))
    assert "a -- b -> c" in str(error)
