"""The comparison that a compile ends with."""

from __future__ import annotations

import pytest

from splitc.compiler.packaging.self_check import _judge
from splitc.runtime.errors import OutputsDifferError
from splitc.runtime.tools.compare import Difference


def difference(name: str, relative: float, passed: bool, problem: str | None = None) -> Difference:
    return Difference(name, relative, relative, (0,), 1.0, 1.0 + relative, passed, problem=problem)


def test_output_may_be_about_as_far_off_as_rounding_moves_it() -> None:
    """As in models whose activations are quantized to 8 bits: it differs by two steps, or by three."""
    found = [difference("y", 0.06, False), difference("z", 0.0, True)]
    own = [[difference("y", move, False), difference("z", 0.0, True)] for move in (0.0, 0.04)]
    assert "rounding" in (said := _judge(found, own))
    assert said.endswith("4.0e-02")


@pytest.mark.parametrize(
    "own",
    [
        [difference("y", 0.02, False), difference("z", 0.2, False)],
        [difference("z", 0.2, False)],
        [difference("y", float("inf"), False, "it is missing"), difference("z", 0.2, False)],
    ],
)
def test_output_that_is_farther_off_is_a_fault(own: list[Difference]) -> None:
    with pytest.raises(OutputsDifferError, match=r"1 of 2 outputs .* 'y' most \(6.0e-02 of its largest value\)"):
        _judge([difference("y", 0.06, False), difference("z", 0.1, False)], [own])
