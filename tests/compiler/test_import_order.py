"""The compiler's rooms stand in the order in which a model passes through them, and no import runs against it."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.imports import find_circles, imports_of

COMPILER = Path(__file__).resolve().parents[2] / "compiler"
# What all rooms stand on comes first, what puts them together last.
ORDER = (
    "model_errors",
    "nodes",
    "remembered",
    "operators",
    "frontend",
    "analysis",
    "sharding",
    "planning",
    "lowering",
    "trials",
    "modes",
    "packaging",
    "plan_tables",
    "candidates_chart",
    "plan_pages",
    "progress",
    "api",
    "pipelines",
    "cli",
)
# Their `__init__` gives names of the rooms below, when they are asked for.
ROOF = "splitc.compiler"


def room(module: str) -> str:
    return module.removeprefix("splitc.compiler.").split(".")[0]


def test_every_room_has_a_place() -> None:
    found = {path.stem if path.is_file() else path.name for path in COMPILER.iterdir() if not path.name.startswith("_")}
    assert found - {"py"} == set(ORDER)


def test_no_import_runs_against_the_order() -> None:
    against = [
        f"{module} imports {other}"
        for module, others in imports_of(COMPILER).items()
        for other in others
        if module != ROOF
        and other.startswith("splitc.compiler.")
        and ORDER.index(room(other)) > ORDER.index(room(module))
    ]
    assert against == []


def test_there_are_no_circles() -> None:
    assert find_circles(imports_of(COMPILER)) == []
