"""Both halves are built of rooms in one order. No import runs against it; late ones and those for types count too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.imports import find_circles, imports_of

ROOT = Path(__file__).resolve().parents[1]
# What all rooms stand on comes first, what puts them together last.
COMPILER = (
    "errors",
    "nodes",
    "remembered",
    "request",
    "operators",
    "graphs",
    "reading",
    "inference",
    "normal_form",
    "sizes",
    "states",
    "adapters",
    "patterns",
    "attention",
    "caches",
    "fusion",
    "execution",
    "analysis",
    "sharding",
    "placement",
    "planning",
    "engine_graphs",
    "lowering",
    "trials",
    "modes",
    "packaging",
    "api",
    "pipelines",
    "show",
    "cli",
)
RUNTIME = (
    "errors",
    "version",
    "units",
    "log",
    "threads",
    "files",
    "arrays",
    "hardware",
    "package",
    "adapters",
    "ipc",
    "feeds",
    "gpu",
    "engines",
    "collectives",
    "ranks",
    "processes",
    "mpi",
    "requests",
    "generate",
    "session",
    "integrations",
    "tools",
    "reports",
    "serving",
    "cli",
    "__main__",
)
HALVES = (("compiler", COMPILER), ("runtime", RUNTIME))
# More modules than these outside of rooms are a room that nobody has made yet.
FLAT = 6
halves = pytest.mark.parametrize(("half", "order"), HALVES, ids=["compiler", "runtime"])


def room(half: str, module: str) -> str:
    return module.removeprefix(f"splitc.{half}").lstrip(".").split(".")[0]


@halves
def test_every_room_has_a_place(half: str, order: tuple[str, ...]) -> None:
    there = {path.stem if path.is_file() else path.name for path in (ROOT / half).iterdir()}
    assert there - {"__init__", "__pycache__", "py"} == set(order)


@halves
def test_few_modules_lie_outside_of_rooms(half: str, order: tuple[str, ...]) -> None:
    assert len(list((ROOT / half).glob("*.py"))) <= FLAT


@halves
def test_imports_follow_the_order_of_the_rooms(half: str, order: tuple[str, ...]) -> None:
    """The half's own `__init__` comes last: it gives names of all rooms, when they are asked for."""
    places = {name: number for number, name in enumerate(order)} | {"": len(order)}
    against = [
        f"{module} imports {other}"
        for module, others in imports_of(ROOT / half).items()
        for other in others
        if other.startswith(f"splitc.{half}") and places[room(half, other)] > places[room(half, module)]
    ]
    assert against == []


@halves
def test_there_are_no_circles(half: str, order: tuple[str, ...]) -> None:
    assert find_circles(imports_of(ROOT / half)) == []


def test_the_c_library_has_no_circles() -> None:
    """A module is a source and its header."""
    includes: dict[str, set[str]] = {}
    for path in (ROOT / "runtime/collectives/native").glob("*.[ch]"):
        others = set(re.findall(r'#include "(\w+)\.h"', path.read_text(encoding="utf-8")))
        includes[path.stem] = includes.get(path.stem, set()) | others - {path.stem}
    assert includes and find_circles(includes) == []


@halves
def test_every_import_is_of_a_module_that_is_there(half: str, order: tuple[str, ...]) -> None:
    there = {module for other, _ in HALVES for module in imports_of(ROOT / other)}
    assert sorted({name for names in imports_of(ROOT / half).values() for name in names} - there) == []


def test_runtime_imports_nothing_of_the_compiler() -> None:
    names = {name for names in imports_of(ROOT / "runtime").values() for name in names}
    assert [name for name in sorted(names) if not name.startswith("splitc.runtime")] == []
