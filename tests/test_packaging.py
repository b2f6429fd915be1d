"""What is installed from a wheel is all of the two packages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_package_is_listed() -> None:
    """An editable installation finds folders that a wheel would lack."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    folders = [path.parent for top in ("compiler", "runtime") for path in (ROOT / top).rglob("__init__.py")]
    expected = {"splitc." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(re.findall(r'"([^"]+)"', block[1])) == expected
