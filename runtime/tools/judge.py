"""Which differences from the unsplit model are its own doing: it draws random numbers, or optimizations change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from splitc.runtime.tools.compare import Difference
from splitc.runtime.units import first_few

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Judged:
    """The differences of a split model's outputs, and what is said of those that are the unsplit model's own doing."""

    differences: list[Difference]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether no output differs for which the split is to blame."""
        return all(each.passed for each in self.differences)


def judge(
    compared: Callable[[Arrays, Arrays], list[Difference]],
    expected: Arrays,
    actual: Arrays,
    again: Callable[[], Arrays],
    plain: Callable[[], Arrays],
) -> Judged:
    """Compare a split model's `actual` outputs with the `expected` ones of the unsplit model.

    Where they differ, the unsplit model runs once more, by `again`, and without ONNX Runtime's optimizations, by
    `plain`, which gives nothing if it fails so.
    """
    judged = Judged(compared(expected, actual), [])
    if not judged.passed:
        judged = _without_random(judged, compared(expected, again()))
    if not judged.passed:
        judged = _without_optimizations(judged, expected, actual, plain(), compared)
    return judged


def _without_random(judged: Judged, own: Sequence[Difference]) -> Judged:
    """Leave out outputs that the unsplit model gives otherwise when it runs again."""
    differ = {each.name: each for each in own if not each.passed}
    bad = [each.name for each in judged.differences if not each.passed and each.name in differ]
    if not bad:
        return judged
    largest = max(differ[name].relative for name in bad)
    note = (
        f"not compared: {first_few(bad)}, since the unsplit model itself gives others when it runs again (by up to "
        f"{largest:.1e} of the largest value, or of another shape), as one that draws random numbers does"
    )
    return Judged([each for each in judged.differences if each.name not in bad], [*judged.notes, note])


def _without_optimizations(
    judged: Judged,
    expected: Arrays,
    actual: Arrays,
    plain: Arrays,
    compared: Callable[[Arrays, Arrays], list[Difference]],
) -> Judged:
    """Compare outputs that differ with those of the unsplit model without optimizations, if these change it."""
    bad = {each.name for each in judged.differences if not each.passed and each.name in plain}
    closer = {each.name: each for each in compared(plain, actual) if each.name in bad and each.passed}
    if not closer:
        return judged
    moved = max(each.relative for each in compared(expected, plain) if each.name in closer)
    note = (
        f"ONNX Runtime's own optimizations change {first_few(list(closer))} of the unsplit model by {moved:.1e} of the "
        "largest value: compared without them"
    )
    return Judged([closer.get(each.name, each) for each in judged.differences], [*judged.notes, note])
