"""What is wrong with fused operators in a manifest."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from splitc.runtime.package.fused import Fused, FusedInput, FusedStep, find_wrong

RIGHT = Fused(
    "Rows_0",
    64,
    [FusedInput(*given) for given in (("all", 64), ("trailing", 64), ("positions", 1), ("table", 32), ("table", 32))],
    [
        FusedStep("Add", [0, 1]),
        FusedStep("RMSNormalization", [5, 1], {"epsilon": 1e-6}),
        FusedStep("RotaryEmbedding", [6, 2, 3, 4], {"heads": 2, "interleaved": 0}),
    ],
)


def test_nothing_is_wrong() -> None:
    assert list(find_wrong(RIGHT)) == []


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"name": "rows(); //"}, "a name that kernels can't have"),
        ({"columns": 60}, "rows of 60 numbers"),
        ({"columns": 1 << 20}, "rows of 1048576 numbers"),
        ({"inputs": []}, "has 0 inputs"),
        ({"inputs": [FusedInput("leading", 64), *RIGHT.inputs[1:]]}, "of which the first must be data"),
        ({"inputs": [*RIGHT.inputs[:4], FusedInput("table", 64)]}, "input 4 has rows of 64 numbers"),
        ({"steps": []}, "no steps"),
        ({"steps": [FusedStep("asm", [0])]}, "'asm' is not known"),
        ({"steps": [FusedStep("Add", [0, 5])]}, r"reads the values \[0, 5\] of 5"),
        ({"steps": [FusedStep("Add", [0])]}, "Add reads the values"),
        ({"steps": [FusedStep("Neg", [2])]}, "Neg reads positions or tables"),
        (
            {"steps": [FusedStep("RotaryEmbedding", [2, 2, 3, 4], {"heads": 2, "interleaved": 0})]},
            "positions or tables",
        ),
        ({"steps": [FusedStep("RMSNormalization", [0, 1], {"epsilon": float("nan")})]}, "has the numbers"),
        ({"steps": [FusedStep("RotaryEmbedding", [0, 1, 3, 4], {"heads": 2, "interleaved": 0})]}, "other values than"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], wrong: str) -> None:
    assert any(re.search(wrong, text) for text in find_wrong(replace(RIGHT, **changes)))
