"""Options with odd values end in a message, or do what they say, and never end in a traceback or hang."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from splitc.runtime.cli.app import command_of
from tests.helpers.command import splitc, splitc_any
from tests.helpers.fuzz import seeds

VALUES = [
    *("", "-1", "0", "-0", "1.5", "nan", "inf", "-inf", "1e-320", "1e400", "0x10", "None", "²", "٣", "é", "[", "a=b"),
    *("9" * 5000, "9" * 400 + "GiB", "-5GiB", "nanGiB", "10GiB", "1,nan", "1,0", "-1,2", "inf,1", "1e-320,1"),
    *("100000xcpu", "cpu99999999999", "cpu0", "../../x", "x:1x-1", "input_ids:0x0", "input_ids:99999999999x9"),
    *("input_ids:1x1e3", "input_ids=nan", "input_ids=[[[", "input_ids=randint:5:1", "input_ids=randint:-1:nan"),
]
# Options that read or write a file, which other tests cover.
FILES = {
    *("--output", "--report", "--trace", "--timing-cache", "--model", "--baseline", "--inputs", "--plan", "--prefill")
}
# More seconds than any command takes.
BOUND = 30.0


def options(command: str) -> list[str]:
    """The options of a command that take a value."""
    given = [param for param in command_of(command).params if not getattr(param, "is_flag", False)]
    names = [max(param.opts, key=len) for param in given]
    return sorted(name for name in names if name.startswith("--") and name not in FILES)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("command", ["plan", "compile", "check", "bench", "generate", "inspect"])
def test_odd_values_end_in_a_message(command: str, seed: int, decoder: Path, package: Path, tmp_path: Path) -> None:
    start: list[object] = {
        "plan": ["plan", decoder, "-d", "2xcpu"],
        "compile": ["compile", decoder, "-d", "2xcpu", "-o", tmp_path / "p", "--force"],
        "check": ["check", package, "--model", decoder, "--no-memory"],
        "bench": ["bench", package, "--runs", "1", "--warmup", "0", "--no-memory"],
        "generate": ["generate", package, "--prompt-ids", "1,2", "-n", "3"],
        "inspect": ["inspect", package],
    }[command]
    random, names = np.random.default_rng(seed), options(command)
    for _ in range(10 if names else 0):
        name, value = (of[random.integers(len(of))] for of in (names, VALUES))
        began = time.monotonic()
        result = splitc_any(*start, name, value)
        assert result.returncode in (0, 1, 2, 3, 4), (name, value, result)
        assert "Aborted" not in result.stderr
        assert result.returncode == 0 or len(result.stderr) < 3000, (name, value)
        assert time.monotonic() - began < BOUND


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-split", ""], "can't read --tensor-split '': write one number a device"),
        (["--tensor-split", "1,nan"], "shares above 0"),
        (["--tensor-split", "inf,1"], "shares above 0"),
        (["--memory", "9" * 5000 + "GiB"], "more memory than there can be"),
        (["--shapes", "input_ids:1x" + "9" * 20], "--shapes gives 'input_ids' the size 99999999999999999999"),
        (["--shapes", "input_ids:1x" + "9" * 5000], "and the largest is"),
        (["--headroom", "9" * 5000], "more memory than there can be"),
        (["--lora-slots", "9" * 20], "--lora-slots 99999999999999999999: the rank of adapters is at most 65,536"),
        (["-d", "100000xcpu"], "too many devices: splitc plans for at most 1024"),
        (["-d", "cpu" + "9" * 5000], "unknown device 'cpu999"),
    ],
)
def test_numbers_that_are_too_large(decoder: Path, arguments: list[str], message: str) -> None:
    result = splitc("plan", decoder, "-d", "2xcpu", *arguments, code=2)
    assert message in " ".join(result.stderr.split())
    assert len(result.stderr) < 400


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e400"])
@pytest.mark.parametrize("option", ["--rtol", "--atol"])
def test_tolerances_that_are_none(decoder: Path, package: Path, option: str, value: str) -> None:
    """With these tolerances every package would pass, or none."""
    found = splitc("check", package, "--model", decoder, option, value, code=2)
    assert "a tolerance of" in found.stderr and "it is a number from 0 on" in found.stderr
