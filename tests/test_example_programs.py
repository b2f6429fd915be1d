"""The programs in examples/ run, as its page says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
SAYS = {
    "split": "largest difference: ",
    "tokens": "5 17 33 ",
    "stream": "4 in flight: ",
    "drop_in": "logits float32 (1, 3, 96)",
    "adapter": "1 layers change",
}


@pytest.mark.parametrize("name", SAYS)
def test_example_programs_run(
    name: str,
    decoder: Path,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"split": [decoder, tmp_path / "package"], "adapter": [decoder]}.get(name, [package])
    monkeypatch.setattr(sys, "argv", [name, *map(str, given)])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert SAYS[name] in said
    if name == "split":
        assert float(said.split()[-1]) < 1e-4


def test_all_are_listed_and_tried() -> None:
    listed = re.findall(r"python examples/(\w+)\.py", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert set(listed) == set(SAYS) == {path.stem for path in FOLDER.glob("*.py")}
