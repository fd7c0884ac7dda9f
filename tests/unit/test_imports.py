"""The import rules of the architecture, read from the source of every module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "roost"
RECORDS = {"types", "messages", "codec", "errors", "config"}
PARTS = {"capture", "planning", "protocol", "pipeline", "averaging", "checkpoint", "metrics", "transport", "weights"}
"""Folders that import records only, never each other."""
EDGES = {"api", "coordinator", "agent", "requester", "dashboard", "demo", "chaos"}
"""What joins the parts; only the command line is above."""
PURE = {"planning", "protocol"}
FORBIDDEN_IN_PURE = {"torch", "asyncio", "socket", "ssl", "select", "threading", "multiprocessing", "subprocess", "time", "os", "io"}
FORBIDDEN_IN_PURE |= {"pathlib", "tempfile", "shutil", "sqlite3", "grpc", "signal", "secrets", "uuid", "logging", "datetime"}
WITHOUT_TORCH = PURE | {"coordinator", "transport", "metrics", "dashboard"}
DANGEROUS_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
RANDOM_ALLOWED = {"Random"}
"""Of the module random, only generators with a seed of their own: no global state."""

FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the folder of src/roost that `path` is in, or the name of a module beside the folders."""
    inside = path.relative_to(SOURCE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported(path: Path) -> set[str]:
    """Return the dotted names that a module imports, at any depth of its code."""
    names: set[str] = set()
    for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(item, ast.Import):
            names.update(alias.name for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            assert item.level == 0, f"{path}: imports are written in full"
            names.add(item.module or "")
            names.update(f"{item.module}.{alias.name}" for alias in item.names)
    return names


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def neighbours(path: Path) -> set[str]:
    """Return the parts of roost that a module imports."""
    modules = {module.stem for module in SOURCE.glob("*.py")} | {folder.name for folder in SOURCE.iterdir() if folder.is_dir()}
    found = {name.split(".")[1] for name in imported(path) if name.startswith("roost.")}
    return found & modules


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(SOURCE))) for path in paths]


def of(parts: set[str]) -> list[object]:
    return named([path for path in FILES if part_of(path) in parts])


@pytest.mark.parametrize("path", of(RECORDS))
def test_records_import_the_standard_library_and_each_other_only(path: Path) -> None:
    assert roots(path) <= sys.stdlib_module_names | {"roost"}
    assert neighbours(path) <= RECORDS


@pytest.mark.parametrize("path", of(PARTS))
def test_parts_import_records_and_never_a_sibling(path: Path) -> None:
    assert neighbours(path) <= RECORDS | {part_of(path)}


@pytest.mark.parametrize("path", of(EDGES))
def test_what_joins_the_parts_never_imports_the_command_line(path: Path) -> None:
    assert not neighbours(path) & {"cli", "__main__"}


@pytest.mark.parametrize("path", of(PURE))
def test_pure_parts_import_nothing_that_touches_the_world(path: Path) -> None:
    assert not roots(path) & FORBIDDEN_IN_PURE
    used = {name.removeprefix("random.") for name in imported(path) if name.startswith("random.")}
    assert used <= RANDOM_ALLOWED
    assert "numpy.random" not in imported(path)


@pytest.mark.parametrize("path", of(PURE))
def test_pure_parts_use_no_global_random_numbers_and_open_nothing(path: Path) -> None:
    for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "random":
            assert item.attr in RANDOM_ALLOWED, f"line {item.lineno}: random.{item.attr}"
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id in ("np", "numpy"):
            assert item.attr != "random", f"line {item.lineno}: numpy's global random numbers"
        if isinstance(item, ast.Name):
            assert item.id not in ("open", "print", "input"), f"line {item.lineno}: {item.id}"


@pytest.mark.parametrize("path", of({"protocol"}))
def test_protocol_imports_the_standard_library_only(path: Path) -> None:
    assert roots(path) <= sys.stdlib_module_names | {"roost"}


@pytest.mark.parametrize("path", of({"planning"}))
def test_planning_imports_numpy_and_scipy_at_most(path: Path) -> None:
    assert roots(path) <= sys.stdlib_module_names | {"roost", "numpy", "scipy"}


@pytest.mark.parametrize("path", of(WITHOUT_TORCH))
def test_parts_that_do_no_tensor_work_never_import_torch(path: Path) -> None:
    assert "torch" not in roots(path)


@pytest.mark.parametrize("path", named(FILES))
def test_nothing_imports_a_format_that_runs_code(path: Path) -> None:
    assert not roots(path) & DANGEROUS_MODULES


@pytest.mark.parametrize("path", named(FILES))
def test_nothing_evaluates_text_as_code(path: Path) -> None:
    calls = [item for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(item, ast.Call)]
    names = {item.func.id for item in calls if isinstance(item.func, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", named([path for path in FILES if part_of(path) != "cli"]))
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [item for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(item, ast.Call)]
    assert not any(isinstance(item.func, ast.Name) and item.func.id == "print" for item in calls)


def test_no_two_classes_share_a_name() -> None:
    seen: dict[str, Path] = {}
    for path in FILES:
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(item, ast.ClassDef):
                assert item.name not in seen, f"class {item.name} is in {seen[item.name]} and {path}"
                seen[item.name] = path


def test_every_folder_of_the_package_has_its_place_in_the_rules() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= PARTS | EDGES | {"cli"}
