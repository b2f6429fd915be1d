"""Fused operators of engines on GPUs, as a manifest describes them: steps on rows, which become one kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

Span = Literal["all", "leading", "trailing", "positions", "table"]
Half = Literal["float16", "bfloat16"]


class FusedInput(Struct, frozen=True):
    """An input of a fused operator, as rows of `width` numbers.

    `width` is the number of columns; or 1, for one number a row. `span` says which row of the input goes with a row of
    the data: the same one (`all`); or the input has fewer rows, of which one goes with several rows in a row
    (`leading`, as a vector for each image), or they repeat (`trailing`, as a bias of several heads). Positions and
    tables are looked up by a step.
    """

    span: Span
    width: int


class FusedStep(Struct, frozen=True):
    """A step: an operator, the values that it reads, and its numbers, such as `epsilon`.

    Values are counted from the inputs on, and the result of each step is the next one.
    """

    operator: str
    reads: list[int]
    numbers: dict[str, float] = {}


class Fused(Struct, frozen=True):
    """A fused operator: its name in the engine's file, and the steps on each row of `columns` numbers.

    The first input is data of span `all`. The output has its shape, and is the result of the last step. Inputs are of
    type `dtype`, except for positions, and so is the output.
    """

    name: str
    columns: int
    inputs: list[FusedInput]
    steps: list[FusedStep]
    dtype: Half = "float16"


# Numbers of columns are multiples of this one, which a kernel's threads load at once, and at most the other.
WIDTH, LONGEST = 8, 1 << 14
# The most inputs of a kernel, and the longest name, as in native/fused_operators.h.
INPUTS, LONGEST_NAME = 12, 63
# Steps, with the inputs that they have at least and at most, and the names of their numbers.
ROTARY = "RotaryEmbedding"
STEPS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"), (2, 2, ())),
    **dict.fromkeys(("Neg", "Relu", "Sigmoid", "Tanh", "Erf", "Gelu", "GeluTanh"), (1, 1, ())),
    "QuickGelu": (1, 1, ("alpha",)),
    "Clip": (3, 3, ()),
    "LayerNormalization": (2, 3, ("epsilon",)),
    "RMSNormalization": (2, 2, ("epsilon",)),
    ROTARY: (4, 4, ("heads", "interleaved")),
}


def find_wrong(kernel: Fused) -> Iterator[str]:
    """What is wrong with a fused operator: its kernel would not compile, or read other memory than its inputs."""
    if not kernel.name.isidentifier() or not kernel.name.isascii() or len(kernel.name) > LONGEST_NAME:
        yield "it has a name that kernels can't have"
    if kernel.columns % WIDTH or not WIDTH < kernel.columns <= LONGEST:
        yield f"it has rows of {kernel.columns} numbers"
    if not 0 < len(kernel.inputs) <= INPUTS or kernel.inputs[0].span != "all":
        yield f"it has {len(kernel.inputs)} inputs, of which the first must be data"
    for number, given in enumerate(kernel.inputs):
        if given.width not in _widths(given.span, kernel.columns):
            yield f"its input {number} has rows of {given.width} numbers"
    for number, step in enumerate(kernel.steps):
        yield from _wrong_in(kernel, step, len(kernel.inputs) + number)
    if not kernel.steps:
        yield "it has no steps"


def _widths(span: str, columns: int) -> tuple[int, ...]:
    return {"all": (columns,), "positions": (1,), "table": (columns // 2,)}.get(span, (columns, 1))


def _wrong_in(kernel: Fused, step: FusedStep, number: int) -> Iterator[str]:
    """What is wrong with a step whose result has this number."""
    if step.operator not in STEPS:
        yield f"its step '{step.operator}' is not known"
        return
    least, most, names = STEPS[step.operator]
    if not least <= len(step.reads) <= most or any(not 0 <= place < number for place in step.reads):
        yield f"its step {step.operator} reads the values {step.reads} of {number}"
        return
    if set(step.numbers) != set(names) or not all(map(math.isfinite, step.numbers.values())):
        yield f"its step {step.operator} has the numbers {step.numbers}"
        return
    spans = [kernel.inputs[place].span if place < len(kernel.inputs) else "all" for place in step.reads]
    data = spans
    if step.operator == ROTARY:
        data = spans[:1]
        if spans[1:] != ["positions", "table", "table"] or step.numbers["heads"] < 1 or kernel.columns % (2 * WIDTH):
            yield f"its step {ROTARY} reads other values than positions and tables"
    if not {"positions", "table"}.isdisjoint(data):
        yield f"its step {step.operator} reads positions or tables"
