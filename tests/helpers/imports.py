"""The modules that each module imports, read from its file: late imports and those for types count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# How a table writes the place of an object that is imported on demand.
ENTRY = re.compile(r"(splitc(?:\.\w+)+):\w+")


@cache
def imports_of(package: Path) -> dict[str, set[str]]:
    """For each module of a package in the checkout, the splitc modules that it imports."""
    modules = {_name(package, path): path for path in package.rglob("*.py")}
    return {name: _imported(path, set(modules)) - {name} for name, path in modules.items()}


def _name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(("splitc", *(part for part in parts if part != "__init__")))


def _imported(path: Path, known: set[str]) -> set[str]:
    """The modules that a file imports. A name that is imported from a package may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (entry := ENTRY.fullmatch(node.value)):
            found.add(entry[1])
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{path} imports by a relative name"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in known else node.module)
    return {name for name in found if name.split(".")[0] == "splitc"}


def find_circles(imports: Mapping[str, set[str]]) -> list[str]:
    """A circle of imports, in the order in which its modules import each other; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return [str(module) for module in error.args[1]]
    return []
