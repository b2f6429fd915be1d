"""An operator's entry in the registry: all that splitc knows of it, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from splitc.compiler.operators.operation import Operation

# Relates the axes of a node's inputs and outputs, and records what follows for a rank that holds a shard.
AxesRule = Callable[[Operation], None]
Shapes = Sequence[tuple[int, ...]]
# Floating point operations of a node, from the bound shapes of its inputs and outputs.
Flops = Callable[[ir.Node, Shapes, Shapes], int]
# A shape function as onnx-shape-inference has them: of its context and a node.
ShapeFunction = Callable[[Any, ir.Node], None]


@dataclass(frozen=True)
class Operator:
    """What the passes ask of an operator. `name` has the domain, where that is not ONNX's own: `com.microsoft.Gelu`.

    axes: the rule of its axes. Without one, the operator needs every axis whole.
    flops: its cost. Without, one operation for each element that it makes.
    shapes: its shape function, where onnx-shape-inference has none.

    Cost and memory:
    random: it draws numbers, so it must not be computed twice.
    unpacks: it makes a weight larger (dequantizes), so engines compute it in each run and keep what it reads.
    reads_part: it reads as many bytes of its input as it makes.
    view: its output is the memory of its first input.

    Shape arithmetic:
    folds: exporters compute sizes with it, so its output is known beforehand where its inputs are.
    expands: its output may be longer than what it reads.
    passes_sizes: it hands on entries of a shape vector unchanged.
    reads_shape: it reads the sizes of its input, and no data.
    takes_places: the sizes that it is told are places along an axis: a start, an end, a length.

    Meaning, by which the roles of a model's inputs are found. Numbers are those of inputs.
    lookups: pairs of indices and the table that they pick rows of.
    positions: inputs that say a position, or a place to write at.
    masks: inputs that are masks, biases of attention scores, or lengths.
    rearranges: it hands on its first input in another form.
    multiplies: it is a product of what it reads.
    normalizes: it makes a norm of what it reads.
    scales: it may stand between attention's scores and their softmax.
    rotates: it may stand between positions and the sine of their angles.

    Splits:
    matrix: the input that is the matrix of a product, whose columns row mode may slice.
    in_place: it can write a state's new value over the old one.
    adds: it is an addition, so one sum will do for all its partial inputs.
    negates: inputs that it subtracts.
    factors: attributes that belong to an input, and go with it.
    """

    name: str
    axes: AxesRule | None = None
    flops: Flops | None = None
    shapes: ShapeFunction | None = None
    random: bool = False
    unpacks: bool = False
    reads_part: bool = False
    view: bool = False
    folds: bool = False
    expands: bool = False
    passes_sizes: bool = False
    reads_shape: bool = False
    takes_places: bool = False
    lookups: tuple[tuple[int, int], ...] = ()
    positions: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()
    rearranges: bool = False
    multiplies: bool = False
    normalizes: bool = False
    scales: bool = False
    rotates: bool = False
    matrix: int | None = None
    in_place: bool = False
    adds: bool = False
    negates: frozenset[int] = frozenset()
    factors: Mapping[int, str] = field(default_factory=dict)
