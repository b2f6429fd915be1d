"""An operator's entry in the registry: all that splitc knows about it, in one place."""

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
# A shape function of onnx-shape-inference, with its context and a node as arguments.
ShapeFunction = Callable[[Any, ir.Node], None]
# What an input may hold, for a node that is tried on made-up data; None if it may hold anything.
Example = Callable[[Operation, int], Any]


@dataclass(frozen=True)
class Operator:
    """What passes ask about an operator. `name` has the domain, if that is not ONNX's own: `com.microsoft.Gelu`.

    axes: the rule for its axes. Without one, it needs every axis whole.
    flops: its cost. Without one, it costs one operation for each element of its first output.
    shapes: its shape function, if onnx-shape-inference has none, or a wrong one.

    Cost and memory:
    random: it draws random numbers, so it must not be computed twice.
    random_if: the input that says whether it draws random numbers.
    unpacks: it makes a weight larger (dequantizes). Engines keep its input and compute it in each run.
    rounds: it quantizes numbers that are computed, or computes with such. So a sum in another order may give others.
    reads_part: it reads only as many bytes of its input as its output has.
    view: its output shares the memory of its first input.

    Shape arithmetic:
    folds: exporters use it in shape arithmetic, so it is computed beforehand if its inputs are known.
    expands: its output may be longer than its inputs.
    passes_sizes: it passes on entries of a shape vector unchanged.
    reads_shape: it reads the sizes of its input, and no data.
    takes_places: the sizes that it takes are positions along an axis: a start, an end, a length.

    Meaning, to find the roles of a model's inputs. Inputs are given by number.
    lookups: pairs of indices, and of the table that they pick rows from.
    positions: inputs that are positions, or indices to write at.
    masks: inputs that are masks, biases of attention scores, or lengths.
    rearranges: it passes on its first input in another form.
    multiplies: it is a product of its inputs.
    normalizes: it normalizes its input.
    scales: it may come between attention scores and their softmax.
    rotates: it may come between positions and the sines of their angles.

    Engines:
    attends: it is attention, for which ONNX Runtime chooses kernels by shape.

    Splits:
    matrix: the input that is the matrix of a product, whose columns row mode may slice.
    in_place: it can write a state's new value over the old one.
    example: what its inputs may hold where not anything goes: lengths, positions.
    adds: it is an addition, so one sum serves all its partial inputs.
    negates: inputs that it subtracts.
    factors: for an input, the attribute that scales it, which is dropped together with it.
    """

    name: str
    axes: AxesRule | None = None
    flops: Flops | None = None
    shapes: ShapeFunction | None = None
    random: bool = False
    random_if: int | None = None
    unpacks: bool = False
    rounds: bool = False
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
    attends: bool = False
    normalizes: bool = False
    scales: bool = False
    rotates: bool = False
    matrix: int | None = None
    in_place: bool = False
    example: Example | None = None
    adds: bool = False
    negates: frozenset[int] = frozenset()
    factors: Mapping[int, str] = field(default_factory=dict)
