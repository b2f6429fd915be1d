"""Options without an effect, or that contradict a plan, end in a message that names both; nothing is written."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from splitc.compiler.packaging.building import OPTIONS, BuildSettings
from splitc.compiler.request.request import options_of_requests
from splitc.runtime.cli.app import COMMANDS, command_of
from splitc.runtime.cli.options import RULES, Command
from splitc.runtime.package.manifest import BuildOptions
from tests.helpers.command import splitc


def commands() -> dict[str, Any]:
    return {name: command_of(name) for name in COMMANDS}


def said(*arguments: object) -> str:
    """The error of a command that is misused, in one line."""
    return " ".join(splitc(*arguments, code=2).stderr.split())


@pytest.fixture(scope="module")
def plan(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    splitc("plan", decoder, "-d", "2xcpu", "--split-mode", "tensor", "--memory", "1GiB", "-o", path)
    return path


def test_what_a_plan_leaves_open() -> None:
    """For each new option somebody must decide whether a plan settles it."""
    open_ones = {name for name, option in options_of_requests().items() if option.planned is None}
    assert open_ones == {"threads", "trust_external_data"}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--split-mode", "layer", "says layer, and PLAN says tensor"),
        ("--split-mode", "nonsense", "says nonsense, and PLAN says tensor"),
        ("--split-mode", "auto", "says auto, and PLAN says tensor"),
        ("--objective", "latency", "says latency, and PLAN says throughput"),
        ("-d", "cpu0", "says cpu0, and PLAN says cpu0,cpu1"),
        ("--memory", "2GiB", "says 2GiB, and PLAN says cpu0=1073741824, cpu1=1073741824"),
        ("--tensor-split", "3,1", "says 3.0,1.0, and PLAN says"),
        ("--pipeline-stages", "2", "says 2, and PLAN says 1"),
        ("--engine", "tensorrt", "says tensorrt, and PLAN says onnxruntime"),
        ("--shapes", "input_ids:1x99", "says input_ids:1 x 99, and PLAN says input_ids:1 x 16"),
        ("--shapes", "nobody:1", "says nobody:1, and PLAN says nobody=nothing"),
        ("--min-shapes", "input_ids:1x1", "says input_ids:1 x 1, and PLAN says input_ids:1 x 16"),
        ("--set", "input_ids=1", "says input_ids=1, and PLAN says input_ids=nothing"),
        ("--headroom", "2GiB", "has no effect with PLAN"),
        ("--fallback", "layer", "has no effect with PLAN"),
        ("--main-device", "cpu1", "has no effect with PLAN"),
        ("--row-min", "8", "has no effect with PLAN"),
    ],
)
def test_options_that_contradict_a_plan(
    option: str, value: str, message: str, decoder: Path, plan: Path, tmp_path: Path
) -> None:
    text = said("compile", decoder, "--plan", plan, "-o", tmp_path / "p", option, value)
    assert f"{option} {message.replace('PLAN', str(plan))}" in text
    assert not list(tmp_path.iterdir())


def test_options_that_say_what_the_plan_says(decoder: Path, plan: Path, tmp_path: Path) -> None:
    same = ["--split-mode", "tensor", "--objective", "throughput", "-d", "2xcpu", "--memory", "1GiB"]
    same += ["--tensor-split", "7,7", "--pipeline-stages", "1", "--engine", "onnxruntime"]
    same += ["--shapes", "input_ids:1x16", "--max-shapes", "input_ids:1x16", "--threads", "1"]
    splitc("compile", decoder, "--plan", plan, "-o", tmp_path / "p", *same)


def test_each_build_setting_has_its_engines() -> None:
    own = {each.name for each in fields(BuildSettings)} - {"options"}
    assert set(OPTIONS) == own | set(BuildOptions.__struct_fields__)
    flags = {flag for param in commands()["compile"].params for flag in param.opts}
    assert flags.issuperset(flag.split()[0] for flag, _ in OPTIONS.values())


@pytest.mark.parametrize(
    "option",
    [
        *("--workspace 1GiB", "--builder-optimization-level 0", "--version-compatible", "--hardware-compatible"),
        *("--weight-streaming", "--strip-weights", "--tactic-sources none", "--timing-cache t", "--keep-onnx"),
        *("--build later", "--min-shapes input_ids:1x1", "--opt-shapes input_ids:1x2", "--max-shapes input_ids:1x3"),
    ],
)
def test_options_of_another_engine(option: str, decoder: Path, tmp_path: Path) -> None:
    text = said("compile", decoder, "-d", "cpu0", "-o", tmp_path / "p", *option.split())
    assert option.split()[0] in text
    assert "tensorrt" in text
    assert "onnxruntime" in text
    assert not list(tmp_path.iterdir())


def test_all_commands_look_at_the_rules() -> None:
    found = commands()
    assert all(isinstance(each, Command) for each in found.values())
    flags = [{flag for param in each.params for flag in param.opts} for each in found.values()]
    for rule in RULES:
        assert any({rule.option, rule.needs or rule.bars} <= names for names in flags), rule


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "PACKAGE", "--baseline-threads", "1"], "--baseline-threads has no effect without --baseline"),
        (["bench", "PACKAGE", "--trust-external-data"], "--trust-external-data has no effect without --baseline"),
        (["check", "PACKAGE", "-m", "MODEL", "--inputs", "x.npz", "--seed", "0"], "--seed and --inputs together"),
        (["check", "PACKAGE", "-m", "MODEL", "--inputs", "x.npz", "--fill", "a=ones"], "--fill and --inputs together"),
        (["generate", "PACKAGE", "--prompt-ids", "1", "--prompt", "a"], "--prompt and --prompt-ids together"),
        (["generate", "PACKAGE", "--prefill", "PACKAGE", "--prompt-chunk", "3"], "--prompt-chunk and --prefill"),
        (
            ["plan", "MODEL", "-d", "2xcpu", "--split-mode", "layer", "--explain", "--no-fuse"],
            "--explain lists what was fused or placed, layers without slots, and the axes of --split-mode tensor",
        ),
        (["plan", "MODEL", "-d", "2xcpu", "--explain", "--json"], "--explain and --json together"),
        (["plan", "MODEL", "-d", "2xcpu", "--hosts", "2x1xcpu"], "--hosts and --device together"),
        (["plan", "MODEL", "-d", "2xcpu", "--memory", "1GiB", "--headroom", "0"], "--memory gives the budget of every"),
    ],
)
def test_options_without_effect(
    arguments: list[str], message: str, decoder: Path, package: Path, tmp_path: Path
) -> None:
    inputs = tmp_path / "x.npz"
    inputs.touch()
    places = {"MODEL": decoder, "PACKAGE": package, "x.npz": inputs}
    assert message in said(*(places.get(word, word) for word in arguments))
