"""Differences that the unsplit model itself explains: by NaN, random numbers, optimizations, or rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from splitc.runtime.tools.compare import NOT_FINITE, Difference
from splitc.runtime.tools.rounding import Arrays, excuse, own_moves
from splitc.runtime.tools.unsplit import Reference
from splitc.runtime.units import first_few

Compare = Callable[[Arrays, Arrays], list[Difference]]
# Where rounding alone moves an output by this part of its largest value, to compare outputs says little. A choice: no
# image, sound or choice of tokens survives it.
UNSTEADY = 0.1


@dataclass(frozen=True)
class Judged:
    """The differences of a split model's outputs, and notes on those that the unsplit model itself explains.

    `unsteady` says of those that remain why they may be right: which rounding moves far in the unsplit model, or which
    of its own numbers are infinite.
    """

    differences: list[Difference]
    notes: list[str]
    unsteady: str = ""

    @property
    def passed(self) -> bool:
        """Whether no output differs because of the split."""
        return all(output.passed for output in self.differences)


def judge(
    compared: Compare,
    whole: Reference,
    feeds: Arrays,
    expected: Arrays,
    actual: Arrays,
    *,
    excused: bool = True,
    unset: Sequence[str] = (),
) -> Judged:
    """Compare a split model's `actual` outputs on `feeds` with the `expected` ones of the unsplit model.

    Those that are partly `unset` are not compared: their other rows are whatever the memory held, which may be the same
    in two runs.

    Where they differ, the unsplit model runs again: once more, without ONNX Runtime's optimizations, and with feeds or
    weights that differ in the last digit. What it does itself then is excused, unless rounding is not to be `excused`.
    """
    left = [name for name in unset if name in expected]
    expected = {name: array for name, array in expected.items() if name not in left}
    note = f"not compared: {first_few(left)}, of which the model sets only the rows that are filled"
    judged = _without_undefined(Judged(compared(expected, actual), [note] if left else []), expected)
    if not judged.passed:
        judged = _without_random(judged, compared(expected, whole.run(feeds)))
    if not judged.passed:
        plain = whole.run_unoptimized(feeds)
        judged = _without_optimizations(judged, expected, actual, plain, compared)
        if not judged.passed and excused:
            judged = _without_rounding(judged, [compared(expected, e) for e in (plain, *whole.run_nudged(feeds))])
            infinite = any(output.problem == NOT_FINITE for output in judged.differences)
            # Kernels that compute in float32 may hide them in the unsplit model: what ranks exchange is in float16.
            if infinite and (product := whole.overflowing(feeds)):
                unsteady = f"'{product}' of the unsplit model has numbers beyond the largest of float16"
                judged = replace(judged, unsteady=unsteady)
    return judged


def undefined_outputs(expected: Arrays) -> list[str]:
    """The outputs of which every number is NaN: such an output agrees with itself whatever was computed before."""
    known = {name: np.asarray(array) for name, array in expected.items()}
    return [name for name, array in known.items() if array.size and np.isnan(array.astype(np.float64)).all()]


def _without_undefined(judged: Judged, expected: Arrays) -> Judged:
    """Leave out outputs that agree, and of which the unsplit model computes nothing but NaN."""
    undefined = set(undefined_outputs(expected))
    blank = [output.name for output in judged.differences if output.passed and output.name in undefined]
    if not blank:
        return judged
    note = (
        f"not compared: {first_few(blank)}, since every number there is NaN in the unsplit model too: give other "
        "inputs (--inputs, --fill)"
    )
    return Judged([output for output in judged.differences if output.name not in blank], [*judged.notes, note])


def _without_random(judged: Judged, own: Sequence[Difference]) -> Judged:
    """Leave out outputs that differ between two runs of the unsplit model."""
    differ = {output.name: output for output in own if not output.passed}
    bad = [output.name for output in judged.differences if not output.passed and output.name in differ]
    if not bad:
        return judged
    largest = max(differ[name].relative for name in bad)
    note = (
        f"not compared: {first_few(bad)}, since two runs of the unsplit model itself differ there (by up to "
        f"{largest:.1e} of the largest value, or in shape), as with random numbers"
    )
    return Judged([output for output in judged.differences if output.name not in bad], [*judged.notes, note])


def _without_optimizations(
    judged: Judged, expected: Arrays, actual: Arrays, plain: Arrays, compared: Compare
) -> Judged:
    """Compare outputs that differ with those of the unsplit model without optimizations, if these change it."""
    bad = {output.name for output in judged.differences if not output.passed and output.name in plain}
    closer = {output.name: output for output in compared(plain, actual) if output.name in bad and output.passed}
    if not closer:
        return judged
    moved = max(output.relative for output in compared(expected, plain) if output.name in closer)
    note = (
        f"ONNX Runtime's own optimizations change {first_few(list(closer))} of the unsplit model by {moved:.1e} of the "
        "largest value: compared without them"
    )
    return Judged([closer.get(output.name, output) for output in judged.differences], [*judged.notes, note])


def _without_rounding(judged: Judged, own: Sequence[Sequence[Difference]]) -> Judged:
    """Pass outputs that are about as far off as the `own` ones of the unsplit model, where only rounding differs.

    In quantized models another order of summation may change how a number is rounded, and with it all that follows: an
    output is then some steps off.
    """
    excused = excuse(judged.differences, own)
    moved = own_moves(own)
    names = [output.name for output in excused if not output.passed]
    left = {name: moved[name] for name in names if moved.get(name, 0) >= UNSTEADY}
    if left:
        unsteady = f"rounding alone changes {first_few(list(left))} of the unsplit model by {max(left.values()):.1e}"
        judged = replace(judged, unsteady=unsteady)
    bad = [old.name for old, new in zip(judged.differences, excused, strict=True) if new.passed and not old.passed]
    if not bad:
        return judged
    note = (
        f"{first_few(bad)}: the difference is rounding that the model amplifies. Without ONNX Runtime's "
        f"optimizations, or with inputs or weights that differ in their last digit, its own outputs change by "
        f"{max(moved[name] for name in bad):.1e}"
    )
    return replace(judged, differences=excused, notes=[*judged.notes, note])
