"""The Dockerfile, which tests can't build: its stages, the files that it copies, its commands and extras exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import ROOT
from tests.helpers.example_commands import extras, run_script

FILE = ROOT / "docker" / "Dockerfile"
KNOWN = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT", "CMD", "USER"}


def instructions() -> list[tuple[str, str]]:
    """The file's instructions, each with its arguments."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def given(wanted: str) -> list[str]:
    return [rest for name, rest in instructions() if name == wanted]


def test_instructions_are_docker_s() -> None:
    assert {name for name, _ in instructions()} == KNOWN
    for text in (*given("ENTRYPOINT"), *given("CMD")):
        assert json.loads(text)
    assert all(re.fullmatch(r"(\w+=\S+ ?)+", text) for text in given("ENV"))


def test_stages_that_are_named_come_before() -> None:
    stages = set[str]()
    for name, rest in instructions():
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            assert image in stages or re.fullmatch(r"python:3\.\d+-slim", image)
            stages.add(stage)
        if name == "COPY" and (source := re.match(r"--from=(\w+) ", rest)):
            assert source[1] in stages
    assert stages == {"wheel", "base", "cpu", "cuda"}


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs sh")
def test_commands_are_shell() -> None:
    for text in given("RUN"):
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def test_extras_and_the_command_exist() -> None:
    installed = [re.search(r"whl\)\[([\w,]+)\]", text) for text in given("RUN") if text.startswith("pip install")]
    assert len(installed) == 2
    for match in installed:
        assert match is not None and set(match[1].split(",")) <= extras()
    (entry,) = map(json.loads, given("ENTRYPOINT"))
    assert f"\n{entry[0]} = " in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_comment_builds_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^#   (docker build .*)$", FILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    run_script("\n".join(lines), tmp_path)
    with pytest.raises(AssertionError, match="no stage"):
        run_script("docker build -f docker/Dockerfile --target gpu .", tmp_path)
