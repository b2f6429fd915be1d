"""A node as axes rules see it: the axes of its inputs and outputs, and what rules record about them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Pin
from splitc.runtime.arrays.array import Array

# The axes of a value; None if its shape is not known.
Axes = tuple[Axis, ...] | None
# For each entry of an attribute or of an input, the axis whose size it is; None for an entry that is not a size.
Sizes = Sequence[Axis | None]

# `Operation.linear` of an operator that is linear in its first input.
LINEAR = (frozenset([0]),)
# The reason for pinning an axis whose sections do not add up to its size.
SUM_DIFFERS = "the sizes of its sections do not add up"
# The number types that collectives sum.
FLOATS, INTEGERS = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"), ("INT8", "UINT8", "INT32", "UINT32", "INT64")
SUMMED = frozenset(ir.DataType[name] for name in (*FLOATS, *INTEGERS))


@dataclass
class Operation:
    """One node. A rule relates its axes, and records the consequences for a rank that has only a shard of them.

    Axes that the rule does not touch are pinned at the end. Inputs are referred to by index.
    """

    node: ir.Node
    inputs: Sequence[Axes]
    outputs: Sequence[Axes]
    constants: Sequence[Array | None]  # for each input, its elements if they are known and few
    weights: Collection[int] = ()  # the inputs that are weights, or computed from weights alone
    # For an input, its known integers, and None for those that depend on sizes.
    mixed: Mapping[int, Sequence[int | None] | None] = field(default_factory=dict)
    contracted: Axis = ()  # the axis that is summed over: a rank with a shard of it computes a partial value
    linear: tuple[frozenset[int], ...] = ()  # sets of inputs: if exactly those of one set are partial, so is the output
    sizes: dict[int, Sizes] = field(default_factory=dict)  # for an input, the axes whose sizes its entries are
    attributes: dict[str, Sizes] = field(default_factory=dict)  # the same for attributes
    # The axes of a convolution's kernel, whose sizes its attributes and its padding are made for.
    windows: Sequence[Axis] = ()
    # The axes whose sizes attributes fix, such as a block of quantization: trials keep their sizes.
    exact: Sequence[Axis] = ()
    # Inputs that are added to the result: if that is partial, exactly one rank must add them.
    add_on_one_rank: frozenset[int] = frozenset()
    zero_point: int | None = None  # the input with the zero point of the first input
    is_lookup: bool = False  # its second input indexes rows of its first input, a table
    averages: bool = False  # it averages over the contracted axis: a rank's mean is weighted by its share of the axis
    # The axis that it needs `statistics` of, which an all-reduce computes: the range, the maximum, the sum of squares,
    # the mean of squares, or also the mean.
    reduced: Axis = ()
    statistics: int = 1
    splits_evenly: bool = False  # it splits an axis into equal lengths, one for each output
    directions: Axis = ()  # the axis of a recurrent network's two directions, forward and backward
    _touched: set[int] = field(default_factory=set)

    def reads(self) -> Iterator[tuple[ir.Value, Axes]]:
        """The inputs that are not left out, each with its axes."""
        return ((value, axes) for value, axes in zip(self.node.inputs, self.inputs, strict=True) if value is not None)

    def has(self, *numbers: int) -> bool:
        """Whether the node has all of these inputs, with known shapes."""
        return all(number < len(self.inputs) and self.inputs[number] is not None for number in numbers)

    def given(self, numbers: Iterable[int]) -> list[tuple[Axis, ...]]:
        """The axes of those of these inputs that the node has, with known shapes."""
        return [self.input(number) for number in numbers if self.has(number)]

    def input(self, number: int) -> tuple[Axis, ...]:
        """The axes of an input whose shape is known."""
        axes = self.inputs[number]
        assert axes is not None, f"input {number} of {self.node.op_type} has no known shape"
        return axes

    def output(self, number: int = 0) -> tuple[Axis, ...]:
        """The axes of an output."""
        axes = self.outputs[number]
        assert axes is not None, f"output {number} of {self.node.op_type} has no known shape"
        return axes

    def has_output(self, number: int) -> bool:
        """Whether an output exists, with a known shape."""
        return number < len(self.outputs) and self.outputs[number] is not None

    @property
    def gives_floats(self) -> bool:
        """Whether its first output is known to be floating point. The division of integers is not linear."""
        dtype = self.node.outputs[0].dtype
        return dtype is not None and dtype.is_floating_point()

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        return self.node.attributes.get_int(name, default)

    def numbers_of(self, name: str) -> list[int] | None:
        """An attribute that is a list of integers; None if it is missing."""
        integers = self.node.attributes.get_ints(name, None)
        return None if integers is None else list(integers)

    def numbers(self, number: int, attribute: str = "") -> list[int] | None:
        """The integers of a constant input, or of the attribute that older opsets have in its place; else None."""
        if number < len(self.constants) and (array := self.constants[number]) is not None:
            return [int(integer) for integer in np.atleast_1d(array)]
        return self.numbers_of(attribute) if attribute else None

    def entries(self, number: int, attribute: str = "") -> Sequence[int | None] | None:
        """As `numbers`, with None for integers that depend on sizes."""
        return self.numbers(number, attribute) or self.mixed.get(number)

    def relate(self, first: Axis, second: Axis) -> None:
        """Record that two axes are the same."""
        self._touched |= {id(first), id(second)}
        ax.relate(first, second)

    def relate_all(self, first: Iterable[Axis], second: Iterable[Axis]) -> None:
        """Record that axes are the same, pair by pair."""
        for a, b in zip(first, second, strict=False):
            self.relate(a, b)

    def relate_others(self, along: Collection[int], output: int = 0) -> None:
        """Record that the axes of the first input and of an output are the same, except those `along`."""
        for number, (source, target) in enumerate(zip(self.input(0), self.output(output), strict=True)):
            if number not in along:
                self.relate(source, target)

    def broadcast(self, source: Sequence[Axis], target: Sequence[Axis]) -> None:
        """Relate the axes of `source` to those of `target`, aligned at the last one. Axes of size 1 fit any axis."""
        for a, b in zip(reversed(source), reversed(target), strict=False):
            if ax.is_unknown(a) or ax.is_unknown(b):
                self.whole([a, b], ax.UNKNOWN.reason)
            elif ax.size_of(a) == ax.size_of(b):
                self.relate(a, b)
            elif ax.size_of(a) != 1:
                self.whole([a, b], "its size is not known")

    def cut(self, axis: Axis, sizes: Sequence[int]) -> list[Axis]:
        """Divide the axis into sections of these sizes, and return them. If they do not add up, all are pinned."""
        self._touched.add(id(axis))
        if sum(sizes) == ax.size_of(axis):
            return ax.cut(axis, sizes)
        sections = [ax.new_axis(size) for size in sizes]
        self.whole([axis, *sections], SUM_DIFFERS)
        return sections

    def whole(self, axes: Iterable[Axis], reason: str = "") -> None:
        """Record that the node needs these axes whole."""
        for axis in axes:
            self._touched.add(id(axis))
            ax.pin(axis, Pin(self.node, reason))

    def free(self, axes: Iterable[Axis]) -> None:
        """Record that these axes may be sharded independently of others, so that they are not pinned."""
        self._touched |= {id(axis) for axis in axes}

    def pattern(
        self, text: str, *, whole: str = "", contract: str = "", known: Mapping[str, Axis] | None = None
    ) -> None:
        """Relate axes by letters, as in einsum and einops: "b l (k g d), b s (k d) -> b l (k g d)".

        - Each term is a value; `-` skips one. A term may have more axes than its value, for broadcasting.
        - Parentheses multiply factors, major first. `(h d + k d)` is two sections.
        - The axis of a letter is `known`, or the first axis that has this letter alone. Axes of size 1 fit any letter.
        - Letters in `whole` are pinned, and those in `contract` are summed over.

        If the node has more inputs or outputs than the pattern has terms, all its axes are pinned.
        """
        letters = dict(known or {})
        pairs: list[tuple[Axis, str]] = []
        for side, tensors in zip(text.split("->"), (self.inputs, self.outputs), strict=True):
            terms = side.split(",")
            if any(axes is not None for axes in tensors[len(terms) :]):
                self.opaque()
                return
            for term, axes in zip(terms, tensors, strict=False):
                if term.strip() != "-" and axes is not None:
                    pairs += zip(reversed(axes), reversed(re.findall(r"\([^)]*\)|\S+", term)), strict=False)
        for axis, token in pairs:
            if token[0] != "(" and ax.size_of(axis) != 1:
                letters.setdefault(token, axis)
        for axis, token in pairs:
            self._match(axis, token, letters)
        self.whole(letters[letter] for letter in whole if letter in letters)
        self.contracted = ax.product(letters.get(letter, ()) for letter in contract)

    def _match(self, axis: Axis, token: str, letters: Mapping[str, Axis]) -> None:
        """Relate an axis to its token in a pattern: a letter, a product, or a list of sections."""
        if ax.is_unknown(axis):
            self.whole([letters[name] for name in re.findall(r"\w+", token) if name in letters], ax.UNKNOWN.reason)
            return
        if ax.size_of(axis) == 1:
            return
        terms = token.strip("()").split("+")
        sections = [ax.product(letters.get(name, ()) for name in term.split()) for term in terms]
        sizes = [ax.size_of(section) for section in sections]
        if sum(sizes) != ax.size_of(axis):
            self.whole([axis, *sections], SUM_DIFFERS)
        elif len(sections) == 1:
            self.relate(axis, sections[0])
        else:
            self.relate_all(self.cut(axis, sizes), sections)

    def declare_sizes(self, number: int, sizes: Sizes) -> None:
        """Record that the entries of an input are the sizes of these axes; None for an entry that is no axis's size."""
        if self.has(number):
            self.whole(self.input(number))
            self.sizes[number] = sizes

    def finish(self) -> None:
        """Pin the axes that the rule did not touch, and the contracted one if collectives can't sum its type."""
        dtype = self.node.outputs[0].dtype
        if self.contracted and dtype is not None and dtype not in SUMMED:
            self.whole([self.contracted], f"ranks can't sum {dtype.name}")
        for axes in (*self.inputs, *self.outputs):
            self.whole([axis for axis in axes or () if id(axis) not in self._touched])

    def opaque(self, reason: str = "") -> None:
        """Pin all axes, as for an unknown operator."""
        for axes in (*self.inputs, *self.outputs):
            self.whole(axes or (), reason)
