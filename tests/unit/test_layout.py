"""What the tests' folders have in common."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_files_of_tests_share_a_name_since_python_would_import_one_for_the_other() -> None:
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert not [name for name, times in names.items() if times > 1]
