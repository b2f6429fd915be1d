"""Forms: nodes of one form agree in everything that decides whether they may be sharded. One of each form is tried."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.operation import Axes, Operation, Sizes
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.choice import Choice
from splitc.compiler.sharding.partial import Sums

# A form does not distinguish larger sizes, except by their order, and smaller ones are tried instead. A choice: kernels
# and groups of convolutions are smaller, and matter. With a higher limit, more forms are tried.
LARGE = 12
# The role of an atom in a form.
WHOLE, SHARDED, PARTNER = range(3)


@dataclass(frozen=True, eq=False)
class Form:
    """A node that represents all nodes of its form.

    - `atoms`: the atoms of its axes with their roles, in order of occurrence.
    - `inner`: maps an atom with fewer units than ranks to its partner.
    - `partial`: the inputs that are partial. `gives_partial`: whether its result is.
    - `add_on_one_rank`: the inputs that one rank adds.
    - `is_reduced`: whether ranks compute a statistic together.
    - `planned`: the atoms' sizes in the planned shapes.
    """

    digest: str
    node: ir.Node
    operation: Operation
    atoms: Mapping[Factor, int]
    inner: Mapping[Factor, Factor]
    partial: frozenset[int]
    gives_partial: bool
    add_on_one_rank: frozenset[int]
    is_reduced: bool
    planned: Mapping[Factor, int]


def find_forms(analysis: Analysis, axis_map: AxisMap, choice: Choice) -> Iterator[tuple[ir.Node, Form]]:
    """The nodes that a choice shards, each with its form."""
    roles = dict.fromkeys(choice.chosen, SHARDED) | dict.fromkeys(choice.partners.values(), PARTNER)
    partners, sums = choice.partners, choice.sums
    summed, reduced = frozenset(sums.summed), frozenset(sums.reduced)
    forms: dict[Hashable, Form] = {}
    for node, operation in axis_map.operations.items():
        partial = _partial_inputs(node, sums, summed)
        values = (*operation.inputs, *operation.outputs, (operation.contracted,))
        if not partial and roles.keys().isdisjoint(atom for axes in values for atom in ax.atoms_of(axes)):
            continue  # each rank has it whole
        added, is_reduced = frozenset(sums.added_on_one_rank.get(node, ())), node in reduced
        gives_partial = bool(node.outputs) and node.outputs[0] in sums.partial
        writer = _Writer(roles)
        key = (
            operator_name(node),
            analysis.graph.graph.opset_imports.get(node.domain, 1),
            (tuple(sorted(partial)), gives_partial, tuple(sorted(added)), is_reduced),
            writer.describe(node, operation),
            tuple((writer.numbers[a], writer.numbers.get(b)) for a, b in partners.items() if a in writer.numbers),
        )
        if key not in forms:
            forms[key] = Form(
                digest=blake2b(repr(key).encode(), digest_size=16).hexdigest(),
                node=node,
                operation=operation,
                atoms={atom: roles.get(atom, WHOLE) for atom in writer.numbers},
                inner={a: b for a, b in partners.items() if a in writer.numbers and b in writer.numbers},
                partial=partial,
                gives_partial=gives_partial,
                add_on_one_rank=added,
                is_reduced=is_reduced,
                planned=_sizes(operation, analysis.costs.shapes),
            )
        yield node, forms[key]


def _sizes(operation: Operation, planned: Mapping[str, Shape]) -> dict[Factor, int]:
    """The planned sizes of the atoms that are axes of their own. `planned` are the planned shapes of values."""
    sizes: dict[Factor, int] = {}
    for value, axes in (*operation.reads(), *zip(operation.node.outputs, operation.outputs, strict=True)):
        for axis, size in zip(axes or (), planned.get(value.name or "", ()), strict=False):
            if len(axis) == 1 and axis[0] not in sizes:
                sizes.update(_fitted(axis[0], size, sizes))
    return sizes


def _fitted(whole: Factor, size: int, known: Mapping[Factor, int]) -> dict[Factor, int]:
    """An axis's planned size, and the size of its largest section with which its sections add up to that.

    Sections may be no axis of any value, as of tokens of which a model reads the last ones.
    """
    own = [section[0] for section in whole.sections if len(section) == 1 and section[0].is_atom]
    largest = max((atom for atom in own if atom not in known), key=lambda atom: atom.size, default=None)
    if largest is None:
        return {whole: size}
    return {whole: size, largest: max(1, size - whole.size + largest.size)}


def _partial_inputs(node: ir.Node, sums: Sums, summed: frozenset[ir.Value]) -> frozenset[int]:
    """The inputs that arrive partial, by number."""
    return frozenset(n for n, value in enumerate(node.inputs) if value in sums.partial and value not in summed)


def is_tried(value: ir.Value, axes: Axes) -> bool:
    """Whether an output of a node is tried: not if its shape is unknown and it has no readers."""
    return bool(value.name) and (axes is not None or bool(value.uses()) or value.is_graph_output())


class _Writer:
    """Describes a node as its rule sees it. Atoms are numbered in order of occurrence."""

    def __init__(self, roles: Mapping[Factor, int]) -> None:
        self.numbers: dict[Factor, int] = {}
        self._roles = roles
        self._large: dict[int, int] = {}

    def describe(self, node: ir.Node, operation: Operation) -> Hashable:
        op = operation
        inputs = tuple([self._input(op, number) for number in range(len(node.inputs))])
        made = zip(node.outputs, op.outputs, strict=True)
        outputs = tuple([(value.dtype, is_tried(value, axes), self._axes(axes)) for value, axes in made])
        attributes = tuple(
            [(name, self._attribute(op, name, node.attributes[name])) for name in sorted(node.attributes)]
        )
        recorded = (op.zero_point, op.is_lookup, op.averages, op.splits_evenly, op.add_on_one_rank, op.linear)
        sizes = tuple([(number, self._sizes(axes)) for number, axes in op.sizes.items()])
        contracted = self._axis(op.contracted), self._axis(op.reduced)
        atoms = tuple([(self._size(atom), self._roles.get(atom, WHOLE)) for atom in self.numbers])
        return inputs, outputs, attributes, recorded, sizes, contracted, atoms

    def _size(self, atom: Factor) -> int:
        """The size of an atom as far as it matters: 0 if sharded; if large, a negative number by occurrence."""
        if atom in self._roles:
            return 0
        return atom.size if atom.size <= LARGE else -1 - self._large.setdefault(atom.size, len(self._large))

    def _axes(self, axes: Axes) -> Hashable:
        return None if axes is None else tuple([self._axis(axis) for axis in axes])

    def _axis(self, axis: Axis) -> Hashable:
        return tuple([self._leaf(leaf) for leaf in axis])

    def _leaf(self, leaf: Factor) -> Hashable:
        if (number := self.numbers.get(leaf)) is not None:
            return number
        if leaf.is_atom:
            return self.numbers.setdefault(leaf, len(self.numbers))
        return tuple([self._axis(tuple(ax.leaves(section))) for section in leaf.sections])

    def _input(self, operation: Operation, number: int) -> Hashable:
        value = operation.node.inputs[number]
        if value is None:
            return None
        content = content_of(operation, number)
        if content is None:
            known: Hashable = tuple(mixed_of(operation, number)) or value.is_initializer()
        elif number in operation.sizes:
            known = self._constant_sizes(content, operation.sizes[number])
        else:
            known = (content.shape, content.tobytes())
        return value.dtype, known, self._axes(operation.inputs[number])

    def _constant_sizes(self, content: Any, sizes: Sizes) -> Hashable:
        """The entries of a list of sizes, with "size" instead of those that are an axis's size."""
        entries = zip(np.atleast_1d(content).tolist(), sizes, strict=False)
        return tuple("size" if axis is not None and ax.size_of(axis) == n else n for n, axis in entries)

    def _attribute(self, operation: Operation, name: str, attribute: ir.Attr) -> Hashable:
        value = attribute.value
        if name in operation.attributes:
            return self._constant_sizes([value] if isinstance(value, int) else value, operation.attributes[name])
        if attribute.type == ir.AttributeType.TENSOR:
            return value.dtype, tuple(value.shape), value.tobytes()
        return tuple(value) if isinstance(value, (list, tuple)) else value

    def _sizes(self, sizes: Sizes) -> Hashable:
        return tuple([None if axis is None else self._axis(tuple(ax.leaves(axis))) for axis in sizes])


# A float constant with one of these numbers of elements may be the scales of a Resize, one for each axis. Others are
# data.
FEW_SCALES = range(2, 9)


def mixed_of(operation: Operation, number: int) -> Sequence[int | None]:
    """The known entries of an input, None for unknown ones, if they decide what the node does; else an empty list."""
    return () if number in operation.sizes else operation.mixed.get(number) or ()


def content_of(operation: Operation, number: int) -> Any:
    """The array of an input, if it decides what the node does; None for data, which may be replaced."""
    value, constant = operation.node.inputs[number], operation.constants[number]
    assert value is not None
    if constant is not None and constant.dtype in (np.int64, np.int32):
        return constant
    tensor = value.const_value if value.is_initializer() else None
    if tensor is None:
        return None
    is_flag = tensor.dtype == ir.DataType.BOOL and tensor.size == 1
    is_list = tensor.dtype == ir.DataType.FLOAT and tensor.size in FEW_SCALES and len(tensor.shape) == 1
    is_whole = all(atom.pinned for atom in ax.atoms_of(operation.inputs[number]))
    return tensor.numpy() if is_flag or (is_list and is_whole) else None
