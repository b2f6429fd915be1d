"""No module of the runtime imports one that comes after it, late imports and those for types included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
PACKAGE = "splitc.runtime"
# What all rooms stand on comes first, what puts them together last.
ORDER = (
    "errors",
    "version",
    "units",
    "threads",
    "files",
    "arrays",
    "hardware",
    "package",
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
# What a table says of where something is: it is imported when it is asked for.
ENTRY = re.compile(r"(splitc(?:\.\w+)+):\w+")


def modules() -> dict[str, Path]:
    """The files of the runtime by the names that they are imported by."""
    found = {}
    for path in RUNTIME.rglob("*.py"):
        parts = [PACKAGE, *path.relative_to(RUNTIME).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """What a file imports of splitc, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from {
                whole if (whole := f"{node.module}.{alias.name}") in known else str(node.module) for alias in node.names
            }
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (entry := ENTRY.fullmatch(node.value)):
            yield entry[1]


def graph() -> dict[str, set[str]]:
    """What each module imports of splitc."""
    known = modules()
    return {name: {each for each in imported(path, known) if each.startswith("splitc")} for name, path in known.items()}


def level(module: str) -> int:
    """The place in the order of the room that a module is in, or of the module itself."""
    room = module.removeprefix(PACKAGE).lstrip(".").split(".")[0]
    return ORDER.index(room) if room else len(ORDER)


def test_every_room_has_a_place() -> None:
    found = {path.stem if path.is_file() else path.name for path in RUNTIME.iterdir()}
    assert found - {"__init__", "__pycache__", "py"} == set(ORDER)


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules that import each other, or are imported by some that do: what is left when others are taken out."""
    left = dict(graph)
    while ready := {name for name, needs in left.items() if not needs & left.keys() - {name}}:
        left = {name: needs for name, needs in left.items() if name not in ready}
    return sorted(left)


def test_there_is_no_circle() -> None:
    assert circle(graph()) == []
    assert not [name for name, needs in graph().items() if name in needs]


def test_the_c_library_has_no_circle() -> None:
    """A module is a source and its header."""
    includes: dict[str, set[str]] = {}
    for path in (RUNTIME / "collectives" / "native").glob("*.[ch]"):
        includes.setdefault(path.stem, set()).update(re.findall(r'#include "(\w+)\.h"', path.read_text()))
    assert len(includes) > 5
    assert circle({name: needs - {name} for name, needs in includes.items()}) == []


def test_imports_follow_the_order_of_the_rooms() -> None:
    wrong = [f"{name} imports {each}" for name, needs in graph().items() for each in needs if level(each) > level(name)]
    assert wrong == []


def test_runtime_imports_nothing_of_the_compiler() -> None:
    wrong = [f"{name} imports {each}" for name, needs in graph().items() for each in needs if PACKAGE not in each]
    assert wrong == []


def test_every_import_is_of_a_module_that_is_there() -> None:
    known = modules()
    assert [each for needs in graph().values() for each in needs if each not in known] == []
