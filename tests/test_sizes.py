"""A file is one idea, and a function fits a screen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers.command import ROOT

MOST_LINES, SCREEN = 400, 60


@pytest.mark.parametrize("half", ["compiler", "runtime"])
def test_files_and_functions_are_short(half: str) -> None:
    for path in (ROOT / half).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= MOST_LINES, path
        assert not too_long(text, path)


def too_long(text: str, path: Path) -> list[str]:
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    return [f"{path}: {name} has {lines} lines" for name, lines in lengths if lines > SCREEN]
