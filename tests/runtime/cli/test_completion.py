"""Completion in bash, zsh and fish, by typer's protocol."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splitc.compiler.cli.commands import LIBRARIES
from splitc.runtime.cli import completion
from splitc.runtime.cli.app import app
from splitc.runtime.package.pipeline_file import Module, PipelineFile, write_pipeline
from tests.helpers.command import SCRIPT, splitc_process

Complete = Callable[..., list[str]]
CPUS_AND_GPUS = ("cpu0", "cpu1", "cuda0", "cuda1")
# The name of a module.
ODD = "text [enc]:one"


def asked() -> str:
    """The answer to the request in the environment."""
    found = CliRunner().invoke(app, [])
    assert found.exit_code == 0
    return found.output


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> Complete:
    """A function that returns the lines for bash, for a command whose last word is being typed."""

    def ask(*typed: object) -> list[str]:
        monkeypatch.setenv("_SPLITC_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["splitc", *map(str, typed)]))
        monkeypatch.setenv("COMP_CWORD", str(len(typed)))
        return [line for line in asked().split("\n") if line]

    return ask


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a package, models and other files. Their names have characters special to shells."""
    for name in (f"folder/{ODD}", "folder/vae", "a package", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("model.onnx", "my [model] a:b.onnx", f"folder/{ODD}/model.onnx", "folder/vae/model.onnx", "a.npz"):
        (tmp_path / name).touch()
    write_pipeline(tmp_path / "a package", PipelineFile([Module(ODD, "0", "a.onnx"), Module("vae", "0", "b.onnx")], []))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["insp"], ["inspect"]),
        (["--ver"], ["--version"]),
        (["inspect", "--re"], ["--report"]),
        (["plan", "--spl"], ["--split-mode"]),
        (["plan", "m.onnx", "--split-mode", ""], ["auto", "layer", "tensor", "batch", "row"]),
        (["compile", "--objective", "l"], ["latency"]),
        (["plan", "--engine", "t"], ["tensorrt", "tensorrt-rtx"]),
        (["plan", "--fallback", ""], ["layer"]),
        (["compile", "--weights", ""], ["copy", "link"]),
        (["compile", "--build", ""], ["now", "later"]),
        (["run", "--verify", ""], ["always", "once", "never"]),
        (["bench", "--ranks", ""], ["threads", "processes", "mpi"]),
        (["generate", "--task", ""], ["transcribe", "translate"]),
        (["export", "t"], ["triton"]),
        (["help", "pla"], ["plan", "placement", "planning"]),
        (["help", "planning#b"], ["planning#budgets"]),
        (["help", "nothing#"], []),
    ],
)
def test_words_that_are_known_are_completed(complete: Complete, typed: list[str], found: list[str]) -> None:
    assert complete(*typed) == found


@pytest.mark.parametrize(
    ("option", "typed", "found"),
    [
        ("-d", "cu", ["cuda0", "cuda1"]),
        ("-d", "2", ["2xcpu", "2xcuda"]),
        ("--main-device", "cpu", ["cpu0", "cpu1"]),
        ("-d", '"unet=cuda0&cuda1,vae=c', [f"unet=cuda0&cuda1,vae={each}" for each in CPUS_AND_GPUS]),
        ("-d", "host3/cuda", ["host3/cuda0", "host3/cuda1"]),
    ],
)
def test_devices_are_those_of_this_machine(
    complete: Complete, option: str, typed: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "cores", lambda: 2)
    monkeypatch.setattr(completion, "_count_gpus", lambda: 2)
    assert complete("plan", option, typed) == found


def test_names_are_quoted_for_bash_as_it_takes_them(complete: Complete, odd: Path) -> None:
    assert complete("plan", "") == ["model.onnx", r"my\ \[model\]\ a:b.onnx"]
    assert complete("check", "'a package'", "--model", '"my') == ["my [model] a:b.onnx"], "quotes are open"
    assert complete("inspect", "") == [r"a\ package"]
    assert complete("inspect", f"{odd}/") == [f"{odd}/a\\ package"]
    assert complete("compile", "folder", "--module", "") == [r"text\ \[enc\]:one", "vae"]
    assert complete("compile", "--module", "v", "folder") == [], "what comes after is not known"
    assert complete("bench", "'a package'", "--in-flight", "2", "--module", "v") == ["vae"]


def test_what_can_not_be_read_has_no_completions(complete: Complete, odd: Path) -> None:
    """Shells then complete files."""
    (odd / "other" / "manifest.json").write_text("{")
    assert complete("inspect", "other", "--rank", "") == []
    assert complete("inspect", "none", "--module", "") == []
    assert complete("inspect", "none/") == []
    assert complete("run", "other", "--inputs", "a") == []


def test_what_a_package_has_is_completed(complete: Complete, package: Path) -> None:
    assert complete("inspect", package, "--rank", "") == ["0", "1", "2"]
    assert complete("bench", package, "--fill", "input") == [
        f"input_ids={how}" for how in ("normal", "ones", "zeros", "arange")
    ]
    assert "position_ids=" in complete("check", package, "--fill", ""), "of several the names"


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        (
            "zsh",
            r"""_arguments '*: :(("text [enc]\\:one"
"vae"))'""",
        ),
        ("fish", f"{ODD}\nvae"),
    ],
)
def test_other_shells_quote_themselves(shell: str, expected: str, odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SPLITC_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "splitc inspect 'a package' --module ")
    assert asked().rstrip("\n") == expected
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "splitc compile --weights ")
    assert "link" in asked()


@pytest.mark.parametrize("typed", [["inspect", "PACKAGE", "--rank", ""], ["compile", "FOLDER", "--module", ""]])
def test_completion_loads_nothing_that_takes_long(typed: list[str], package: Path, odd: Path) -> None:
    words = [{"PACKAGE": str(package), "FOLDER": "folder"}.get(each, each) for each in typed]
    heavy = (*LIBRARIES, "onnxruntime", "cupy")
    program = (
        "import os, sys\n"
        f"os.environ.update(_SPLITC_COMPLETE='complete_bash', COMP_CWORD='{len(words)}')\n"
        f"os.environ['COMP_WORDS'] = {chr(10).join(['splitc', *words])!r}\n"
        "from splitc.runtime.__main__ import main\nsys.argv = ['splitc']\n"
        f"try: main()\nfinally: print('loaded', [name for name in {heavy!r} if name in sys.modules])"
    )
    shown = splitc_process("-c", program, start=(sys.executable,)).stdout.splitlines()
    assert len(shown) > 1
    assert shown[-1] == "loaded []"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_completes(odd: Path) -> None:
    """With the installed script: the word that bash would insert for a typed one."""
    program = (
        f"source <({SCRIPT} --show-completion bash)\n"
        f"COMP_WORDS=(splitc inspect a); COMP_CWORD=2; _splitc_completion {SCRIPT}; printf '%s|' \"${{COMPREPLY[@]}}\""
    )
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # or bash would have to be its parent
    found = splitc_process("-c", program, start=("bash",), env=named)
    assert found.stdout == r"a\ package|"
