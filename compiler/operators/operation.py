"""A node as the rules see it: the axes of its inputs and outputs, and what a rule records about them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Pin

# The axes of a value; None where its shape is not known.
Axes = tuple[Axis, ...] | None
# The axes whose sizes an attribute or input has: one for a number, several for a list. None for an entry that is no
# size of an axis.
Sizes = Sequence[Axis | None]

# The number types that collectives sum.
FLOATS, INTEGERS = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"), ("INT8", "UINT8", "INT32", "UINT32", "INT64")
SUMMED = frozenset(ir.DataType[name] for name in (*FLOATS, *INTEGERS))


@dataclass
class Operation:
    """One node. A rule relates its axes, and records the consequences for a rank that has a shard of them.

    Axes that no rule touches are pinned in the end. Inputs are given by number.

    constants: for each input its value, if it is known beforehand and short.
    weights: the inputs that are weights, or computed from weights alone.
    contracted: the axis that is summed over. A rank with a shard of it makes a partial value.
    linear: sets of inputs. The output is partial if all inputs of one set are partial and no others are.
    sizes: for an input, the axes whose sizes its entries are. `attributes` likewise.
    once: inputs that are added to the result, so that only one rank may add them.
    zero: the input with the number that represents 0 in the first input (its zero point).
    lookup: it picks rows of its first input, a table, by its second.
    ranged: it needs the least and the greatest element of its whole first input, which the ranks must find together.
    equal_parts: it cuts an axis into equal lengths, one for each output.
    """

    node: ir.Node
    inputs: Sequence[Axes]
    outputs: Sequence[Axes]
    constants: Sequence[npt.NDArray[Any] | None]
    weights: Collection[int] = ()
    contracted: Axis = ()
    linear: tuple[frozenset[int], ...] = ()
    sizes: dict[int, Sizes] = field(default_factory=dict)
    attributes: dict[str, Sizes] = field(default_factory=dict)
    once: frozenset[int] = frozenset()
    zero: int | None = None
    lookup: bool = False
    ranged: bool = False
    equal_parts: bool = False
    _touched: set[int] = field(default_factory=set)

    def has(self, *numbers: int) -> bool:
        """Whether all of these inputs are given, with known shapes."""
        return all(number < len(self.inputs) and self.inputs[number] is not None for number in numbers)

    def input(self, number: int) -> tuple[Axis, ...]:
        """The axes of an input that is given."""
        found = self.inputs[number]
        assert found is not None, f"input {number} of {self.node.op_type} has no known shape"
        return found

    def output(self, number: int = 0) -> tuple[Axis, ...]:
        """The axes of an output."""
        found = self.outputs[number]
        assert found is not None, f"output {number} of {self.node.op_type} has no known shape"
        return found

    def has_output(self, number: int) -> bool:
        """Whether an output exists, with a known shape."""
        return number < len(self.outputs) and self.outputs[number] is not None

    @property
    def gives_floats(self) -> bool:
        """Whether its first output is known to be of floating point: then dividing it is linear."""
        dtype = self.node.outputs[0].dtype
        return dtype is not None and dtype.is_floating_point()

    def number(self, name: str, default: int) -> int:
        """An attribute that is a whole number."""
        return self.node.attributes.get_int(name, default)

    def numbers_of(self, name: str) -> list[int] | None:
        """An attribute that is a list of whole numbers, or None."""
        found = self.node.attributes.get_ints(name, None)
        return None if found is None else list(found)

    def numbers(self, number: int, attribute: str = "") -> list[int] | None:
        """The integers of a constant input, or of the attribute that older versions have instead; else None."""
        if number < len(self.constants) and (array := self.constants[number]) is not None:
            return [int(each) for each in np.atleast_1d(array)]
        return self.numbers_of(attribute) if attribute else None

    def relate(self, first: Axis, second: Axis) -> None:
        """Record that two axes are the same."""
        self._touched |= {id(first), id(second)}
        ax.relate(first, second)

    def relate_all(self, first: Iterable[Axis], second: Iterable[Axis]) -> None:
        """Record that axes are the same, pair by pair."""
        for a, b in zip(first, second, strict=False):
            self.relate(a, b)

    def broadcast(self, source: Sequence[Axis], target: Sequence[Axis]) -> None:
        """Relate the axes of `source` to those of `target`, aligned at the last one. Axes of size 1 fit any."""
        for a, b in zip(reversed(source), reversed(target), strict=False):
            if ax.is_unknown(a) or ax.is_unknown(b):
                self.whole([a, b], ax.UNKNOWN.reason)
            elif ax.size_of(a) == ax.size_of(b):
                self.relate(a, b)
            elif ax.size_of(a) != 1:
                self.whole([a, b], "its size is not known")

    def cut(self, axis: Axis, sizes: Sequence[int]) -> list[Axis]:
        """Divide the axis into sections of these sizes, and return them. They are whole if they do not add up to it."""
        self._touched.add(id(axis))
        if sum(sizes) == ax.size_of(axis):
            return ax.cut(axis, sizes)
        sections = [ax.new_axis(size) for size in sizes]
        self.whole([axis, *sections], "its parts do not add up")
        return sections

    def whole(self, axes: Iterable[Axis], reason: str = "") -> None:
        """Record that the node needs these axes whole."""
        for axis in axes:
            self._touched.add(id(axis))
            ax.pin(axis, Pin(self.node, reason))

    def free(self, axes: Iterable[Axis]) -> None:
        """Record that these axes may be sharded without any condition, so that they are not pinned."""
        self._touched |= {id(axis) for axis in axes}

    def pattern(
        self, text: str, *, whole: str = "", contract: str = "", known: Mapping[str, Axis] | None = None
    ) -> None:
        """Relate axes by letters, as in einsum and einops: "b l (k g d), b s (k d) -> b l (k g d)".

        Each term is a tensor; `-` skips one. Parentheses multiply factors, major first. `(h d + k d)` is two sections.
        The axis of a letter is `known`, or the first axis that has this letter alone. Terms may have more axes than
        their tensor, for broadcasting. Axes of size 1 fit any letter. Letters in `whole` are pinned, and those in
        `contract` are summed over. If the node has more inputs or outputs than the pattern has terms, all its axes are
        pinned.
        """
        letters = dict(known or {})
        sides = text.split("->")
        tensors = [self.inputs, self.outputs]
        beyond = (axes[len(side.split(",")) :] for side, axes in zip(sides, tensors, strict=True))
        if any(axes is not None for values in beyond for axes in values):
            self.opaque()
            return
        pairs: list[tuple[Axis, str]] = []
        for side, values in zip(sides, tensors, strict=True):
            for number, term in enumerate(side.split(",")):
                tokens = re.findall(r"\([^)]*\)|\S+", term)
                found = values[number] if number < len(values) else None
                if tokens == ["-"] or found is None:
                    continue
                pairs += zip(reversed(found), reversed(tokens), strict=False)
        for axis, token in pairs:
            if token[0] != "(" and ax.size_of(axis) != 1:
                letters.setdefault(token, axis)
        for axis, token in pairs:
            if ax.is_unknown(axis):
                self.whole([letters[name] for name in re.findall(r"\w+", token) if name in letters], ax.UNKNOWN.reason)
                continue
            sections = [
                tuple(factor for name in section.split() for factor in letters.get(name, ()))
                for section in token.strip("()").split("+")
            ]
            sizes = [ax.size_of(section) for section in sections]
            if ax.size_of(axis) == 1:
                continue
            if sum(sizes) != ax.size_of(axis):
                self.whole([axis, *sections], "its parts do not add up")
            elif len(sections) == 1:
                self.relate(axis, sections[0])
            else:
                self.relate_all(self.cut(axis, sizes), sections)
        self.whole(letters[letter] for letter in whole if letter in letters)
        self.contracted = tuple(factor for letter in contract for factor in letters.get(letter, ()))

    def say_sizes(self, number: int, sizes: Sizes) -> None:
        """Record that the entries of an input are the sizes of these axes."""
        if self.has(number):
            self.whole(self.input(number))
            self.sizes[number] = sizes

    def finish(self) -> None:
        """Pin the axes that the rule did not touch, and what is summed over in a number type that ranks can't sum."""
        dtype = self.node.outputs[0].dtype
        if self.contracted and dtype is not None and dtype not in SUMMED:
            self.whole([self.contracted], f"ranks can't sum {dtype.name}")
        for axes in (*self.inputs, *self.outputs):
            untouched = [axis for axis in axes or () if id(axis) not in self._touched]
            self.whole(untouched)

    def opaque(self, reason: str = "") -> None:
        """Pin all axes: nothing is known about the node."""
        for axes in (*self.inputs, *self.outputs):
            self.whole(axes or (), reason)
