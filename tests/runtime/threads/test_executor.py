"""Pools of threads."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_all_pools_are_ours() -> None:
    """Python's own may lose a thread to a signal, and then wait forever at exit."""
    users = [
        path.relative_to(ROOT).as_posix()
        for place in ("compiler", "runtime")
        for path in (ROOT / place).rglob("*.py")
        if "ThreadPoolExecutor" in (text := path.read_text())
        and any(
            isinstance(node, ast.ImportFrom) and "ThreadPoolExecutor" in {alias.name for alias in node.names}
            for node in ast.walk(ast.parse(text))
        )
    ]
    assert users == ["runtime/threads/futures.py"]
