"""A tiny graph for an operator, with what tensor mode must do with its weights.

Most are an operator in the middle of x A -> operator -> B, where the inner axis is to be split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.registry import REGISTRY
from tests.helpers.blocks import FLOAT, Block, check_split

Middle = Callable[[Block, ir.Value], ir.Value]
INT32 = ir.DataType.INT32
# The inner axis, and the other axes in the middle.
INNER, BATCH, PLACES, HIDDEN = 24, 2, 5, 12
# Two ranks with uneven shares.
TWO = ((3, 1),)


@dataclass(frozen=True)
class Tiny:
    """A graph, the weights that must be split, those that must be whole, and the number of sums in a run."""

    build: Callable[[], Block]
    split: Collection[str] = frozenset("AB")
    whole: Collection[str] = ()
    sums: int | None = 1
    shares: Sequence[Sequence[float]] = TWO

    def check(self, folder: Path) -> None:
        """Split it with each of the shares, and compare the outputs with the whole model's."""
        check_split(self.build(), folder, self.split, self.shares, self.whole, self.sums)


def check_operator(graphs: Mapping[str, Tiny], name: str, folder: Path) -> None:
    """Check the graph for the operator of this name, which the graph must contain."""
    assert name in {operator_name(node) for node in graphs[name].build().model().graph}
    graphs[name].check(folder)


def having(field: str) -> list[str]:
    """The operators for which a field of the entry is set."""
    return [name for name, operator in REGISTRY.items() if getattr(operator, field)]


def sandwich(
    middle: Middle,
    *,
    needs: Middle | None = None,
    wide: int = INNER,
    narrow: int = INNER,
    opset: int = 17,
    split: Collection[str] = (),
    whole: Collection[str] = "CD",
    sums: int | None = 1,
    shares: Sequence[Sequence[float]] = TWO,
) -> Tiny:
    """x [n, 5, 12] A [12, wide] -> middle -> B [narrow, 12], with a Softmax before and after, which need 12 whole.

    `split`: further weights in the middle that must be split, beside A and B. `needs`: a use that needs the inner axis
    whole, between two more products with C and D, of which the `whole` ones must stay whole.
    """

    def build() -> Block:
        b = Block(opset)
        x = softmax(b, b.data("x", (BATCH, PLACES, HIDDEN), ["n", "t", HIDDEN]))
        x = softmax(b, b.op("MatMul", middle(b, b.op("MatMul", x, b.w("A", HIDDEN, wide))), b.w("B", narrow, HIDDEN)))
        if needs is not None:
            inner = b.op("MatMul", x, b.w("C", HIDDEN, INNER))
            x = softmax(b, b.op("MatMul", needs(b, inner), b.w("D", INNER, HIDDEN)))
        b.give(x)
        return b

    return Tiny(build, {"A", "B", *split}, whole if needs is not None else (), sums, shares)


def of_integers(b: Block, middle: Callable[[ir.Value], ir.Value]) -> Block:
    """x A B in integers, then `middle`, whose result has an axis of size 1 and one of HIDDEN at the end."""
    numbers = np.random.default_rng(0)
    x = b.op(
        "Cast", b.indices("x", numbers.integers(0, 50, (BATCH, PLACES, HIDDEN)), [BATCH, PLACES, HIDDEN]), to=INT32
    )
    for name, shape in (("A", (HIDDEN, INNER)), ("B", (INNER, HIDDEN))):
        weight = b.weight(name, ir.tensor(numbers.integers(-50, 50, shape, dtype=np.int32)))
        x = b.op("MatMul", b.op("Mod", x, b.constant(97, np.int32)), weight)
    b.give(b.op("Mod", middle(x), b.constant(50, np.int32)), dtype=INT32)
    return b


def softmax(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Softmax", v, axis=-1)


def number(b: Block, value: float) -> ir.Value:
    return b.constant(value, np.float32)


def through(kind: str, **attributes: object) -> Middle:
    """The operator of one value."""
    return lambda b, v: b.op(kind, v, **attributes)


def chain(*kinds: str) -> Middle:
    """Operators of one value, one after the other."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        for kind in kinds:
            v = b.op(kind, v)
        return v

    return middle


def spread(b: Block, v: ir.Value) -> ir.Value:
    """The value times ten, so that rounding leaves something."""
    return b.op("Mul", v, number(b, 10))


def by_heads(b: Block, v: ir.Value, middle: Middle) -> ir.Value:
    """Apply `middle` to [n, t, 8, 3], where the inner axis is divided into heads, and merge these again."""
    return b.op("Reshape", middle(b, b.op("Reshape", v, b.ints(0, 0, 8, 3))), b.ints(0, 0, INNER))


def as_image(b: Block, v: ir.Value, middle: Middle) -> ir.Value:
    """Apply `middle` to [n, channels, places], and transpose back."""
    return b.op("Transpose", middle(b, b.op("Transpose", v, perm=[0, 2, 1])), perm=[0, 2, 1])


def as_float(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Cast", v, to=FLOAT)


def stored(b: Block, name: str, *shape: int, kind: type[np.integer] = np.int8) -> ir.Value:
    """A weight of random 8-bit integers.

    On CPUs without VNNI, ONNX Runtime adds two products of signed and unsigned numbers in 16 bits: none is too large.
    """
    generator = np.random.default_rng(len(name))
    low, high = (0, 255) if kind is np.uint8 else (-64, 64)
    return b.weight(name, ir.tensor(generator.integers(low, high, shape, dtype=kind)))
