"""Run commands of the documentation's pages, and compare the output on the page with what is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from tests.helpers.command import ROOT, splitc

# Options that make examples short, in place of those on a page: command options, flags, and the size of a model.
SHORTER: Mapping[str, Mapping[str, str]] = {"bench": {"--runs": "4", "--warmup": "1"}}
FLAGS = {"bench": "--no-memory", "check": "--no-memory", "compile": "--force"}
SMALLER = {
    "--layers": "2",
    "--hidden": "64",
    "--heads": "4",
    "--kv-heads": "2",
    "--feed-forward": "96",
    "--vocabulary": "50",
}
# Numbers with their units, bars and timelines are not compared.
QUANTITY = re.compile(r"\d[\d.,]*(?: ?(?:[KMGT]?i?B|[nµum]?s|%)(?![\w]))?(?:/s)?")
BAR = re.compile(r"[█▉▊▋▌▍▎▏▓▒░][█▉▊▋▌▍▎▏▓▒░ ]*")
EDIT = re.compile(r"# in plan\.json.*?:   (.+?),?   ->   (.+?),?$")


def run_script(script: str, folder: Path) -> None:
    """Run the lines of a shell script that call splitc, and check that what the other lines name exists."""
    for line in script.replace("\\\n", " ").splitlines():
        if edit := EDIT.match(line):
            _edit(folder / "plan.json", edit[1], edit[2])
        elif words := shlex.split(line, comments=True):
            _runner(words)(words)


def run_console(session: str, folder: Path) -> None:
    """Run the lines behind a `$`, and compare the output with the lines below. `...` matches any lines."""
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        words = shlex.split(line, comments=True)
        printed = _runner(words)(words)
        assert matches(compared(shown), compared(printed)), f"$ {line}\n{printed}"


def matches(shown: Sequence[Sequence[str]], printed: Sequence[Sequence[str]]) -> bool:
    """Whether the lines on the page were printed."""
    if not shown:
        return not printed
    if shown[0] == ["..."]:
        return any(matches(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and matches(shown[1:], printed[1:])


def compared(output: str) -> list[list[str]]:
    """An output's lines as words, without numbers and bars."""
    lines = (QUANTITY.sub("0", BAR.sub(" = ", line)).split() for line in output.splitlines())
    return [[word for word in line if word != "="] for line in lines if line]


def _runner(words: Sequence[str]) -> Callable[[Sequence[str]], str]:
    if words[0] == "python":
        return _run_python
    if words[0] in RUNNERS:
        return RUNNERS[words[0]]
    raise AssertionError(f"'{words[0]}' does not run here: skip the block, with a reason")


def _run_splitc(words: Sequence[str]) -> str:
    command, arguments = words[1], list(words[2:])
    for option, value in SHORTER.get(command, {}).items():
        if option in arguments:
            del arguments[arguments.index(option) : arguments.index(option) + 2]
        arguments += [option, value]
    if (flag := FLAGS.get(command)) is not None and flag not in arguments:
        arguments.append(flag)
    return splitc(command, *arguments).stdout


def _run_python(words: Sequence[str]) -> str:
    """Run a maker of models, for a smaller model. Of benchmarks only the existence is checked."""
    if words[1] == "-m":
        assert find_spec(words[2]) is not None, f"there is no module {words[2]}"
        return ""
    arguments = [SMALLER.get(before, word) for before, word in pairwise(words[1:])]
    program = [sys.executable, str(ROOT / words[1]), *arguments]
    return subprocess.run(program, check=True, capture_output=True, text=True).stdout


def _check_make(words: Sequence[str]) -> str:
    targets = re.findall(r"^([\w.$()/-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    known = {target.replace("$(VENV)", ".venv") for target in targets} | {".venv/test.done"}
    assert set(words[1:]) <= known, f"make has no target {set(words[1:]) - known}"
    return ""


def extras() -> set[str]:
    """The extras that may be in brackets after splitc's name."""
    return set(metadata("splitc").get_all("Provides-Extra") or ())


def _check_pip(words: Sequence[str]) -> str:
    """Check that splitc has these extras."""
    for named in re.findall(r"splitc\[([\w,]+)\]", " ".join(words)):
        assert set(named.split(",")) <= extras()
    return ""


def _check_docker(words: Sequence[str]) -> str:
    """Check that the Dockerfile has the stage that is built. `test_docs` reads the commands that containers run."""
    if words[1] == "build":
        file, stage = (words[words.index(option) + 1] for option in ("-f", "--target"))
        stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert stage in stages, f"{file} has no stage {stage}"
    return ""


def _check_mlserver(words: Sequence[str]) -> str:
    """Check that the program that it would start exists."""
    assert words[1] == "start" and (Path(words[2]) / "settings.json").is_file()
    return ""


RUNNERS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "splitc": _run_splitc,
    "make": _check_make,
    "pip": _check_pip,
    "mlserver": _check_mlserver,
    "docker": _check_docker,
}


def _edit(file: Path, old: str, new: str) -> None:
    """Edit a plan as a comment says."""
    text = file.read_text(encoding="utf-8")
    assert old in text, f"plan.json has no {old}"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
