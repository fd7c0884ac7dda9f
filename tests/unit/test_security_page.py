"""docs/security.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[A-Za-z0-9_/.]+)(?:::([A-Za-z0-9_]+))?`")


def page() -> str:
    return (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(page())
    assert len(named) > 50
    for path, test in named:
        file = ROOT / path
        assert file.exists(), path
        assert not test or re.search(rf"^def {test}\(", file.read_text(encoding="utf-8"), re.MULTILINE), f"{path}::{test}"


def test_every_line_of_the_tables_of_defences_names_a_test() -> None:
    rows = [row[0] for row in re.finditer(r"^\| .+ \|$", page().partition("## What is defended")[2], re.MULTILINE)]
    defences = [row for row in rows if not row.startswith(("| attack ", "| lie ", "| --- "))]
    assert len(defences) > 40
    for row in defences:
        assert NAMED.search(row) is not None, row
        assert "::" in row, row
