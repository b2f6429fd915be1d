"""The graph that one rank of a tensor split runs: weights cut, sizes rewritten, and a node for each sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.frontend.optional import mark_part
from splitc.compiler.lowering.size_rewriter import SizeRewriter
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.partial import chosen_atoms
from splitc.compiler.sharding.sharded_model import ShardedModel

# The node that stands for a sum over the ranks: TensorRT's convention.
COLLECTIVE = "DistCollective"


def rank_graph(split: ShardedModel, stage: Stage, rank: int) -> ir.Graph:
    """The stage's graph as one rank runs it.

    Values keep the model's names: a sum has the name of the value that it makes whole.
    """
    return _RankGraph(split, stage, rank).build()


class _RankGraph:
    """One rank's graph under construction."""

    def __init__(self, split: ShardedModel, stage: Stage, rank: int) -> None:
        self._split = split
        self._rank = rank
        self._shards = split.shards(rank)
        self._graph = stage_graph(split.graph, stage)
        self._sizes = SizeRewriter(self._shards, self._axes, self._length, self._constant)
        self._made: dict[tuple[str, bytes], ir.Value] = {}
        self._summed = {value.name for value in split.choice.sums.summed}
        self._ranged = frozenset(split.choice.sums.ranged)
        self._partial = {value.name for value in split.choice.sums.partial}
        for value in (value for node in self._graph for value in node.outputs):
            known = split.values.get(value.name or "")
            value.type = value.type or (known.type if known is not None else None)

    def build(self) -> ir.Graph:
        for node in list(self._graph):
            original = self._split.nodes.get(node.outputs[0].name or "")
            if original is not None and original.op_type == node.op_type:  # else it is one that layer split added
                self._rewrite(node, original)
        self._say_outputs()
        for value in [*self._graph.inputs, *(value for node in self._graph for value in node.outputs)]:
            self._fit_shape(value)
        self._name_new()
        passes.RemoveUnusedNodesPass()(ir.Model(self._graph, ir_version=10))
        unused = [value for value in self._graph.inputs if not value.uses() and not value.is_graph_output()]
        for value in unused:
            self._graph.inputs.remove(value)
        return self._graph

    def _rewrite(self, node: ir.Node, original: ir.Node) -> None:
        operation = self._split.axis_map.operations[original]
        self._cut_weights(node, operation)
        self._sizes.rewrite(node, operation)
        self._leave_out(node, operation)
        if operation.equal_parts:
            self._say_parts(node, operation)
        if original in self._ranged:  # also where this rank has all of it: the others do not
            self._quantize_together(node)
            return
        result = node.outputs[0]
        if operation.lookup and self._shards.is_split(operation.contracted):
            result = self._look_up(node, operation)
        if result.name in self._partial:
            result = self._add_once(node, original, operation) or result
            if not self._split.counts(self._rank, operation):
                dtype = result.dtype.numpy() if result.dtype is not None else np.dtype(np.float32)
                result = self._wrap(result, "Mul", [result, self._constant(np.array(0, dtype))], "uncounted")
        if result.name in self._summed:
            self._wrap(result, COLLECTIVE, [result], "part", **self._all_reduce("sum"))

    def _leave_out(self, node: ir.Node, operation: Operation) -> None:
        """Make zeros of what the node would sum over that another rank has, where it sums over units of its own too."""
        for leaf in ax.leaves(operation.contracted):
            if self._shards.counts((leaf,)) and not self._shards.counts((leaf,), all):
                number, place = _find_leaf(operation, leaf)
                data, axes = node.inputs[number], operation.input(number)
                assert data is not None and data.dtype is not None
                shape = (-1, *[1] * (len(axes) - place - 1))
                kept = self._constant(self._shards.counted(axes[place]).reshape(shape))
                zero = operation.zero
                given = node.inputs[zero] if zero is not None and operation.has(zero) else None
                nothing = given or self._constant(np.array(0, data.dtype.numpy()))
                masked = ir.node("Where", [kept, data, nothing])
                masked.outputs[0].type = data.type
                self._graph.insert_before(node, masked)
                node.replace_input_with(number, masked.outputs[0])

    def _all_reduce(self, operation: str) -> dict[str, Any]:
        """Attributes of a collective node."""
        return {
            "collective_operation": "all_reduce",
            "reduce_op": operation,
            "root": -1,
            "nb_rank": self._split.ranks,
        }

    def _axes(self, value: ir.Value) -> Axes:
        original = self._split.values.get(value.name or "")
        return None if original is None else self._split.axes(original)

    def _length(self, value: ir.Value) -> int:
        """The number of entries of a shape vector."""
        tensor = value.const_value if value.is_initializer() else None
        if tensor is not None:
            return tensor.size
        axes = self._axes(value)
        return ax.size_of(axes[0]) if axes else 1

    def _constant(self, array: npt.NDArray[Any]) -> ir.Value:
        """A small constant as an initializer, one for equal ones."""
        key = (f"{array.dtype}{array.shape}", array.tobytes())
        if key not in self._made:
            name = f"splitc_constant_{len(self._made)}"
            self._made[key] = self._register(ir.Tensor(array, name=name))
        return self._made[key]

    def _register(self, tensor: ir.TensorProtocol) -> ir.Value:
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _cut_weights(self, node: ir.Node, operation: Operation) -> None:
        """The rank's part of each weight that the node reads; the same part of one weight is one initializer."""
        for number, (value, axes) in enumerate(zip(node.inputs, operation.inputs)):
            if value is None or axes is None or not value.is_initializer() or not self._shards.splits(axes):
                continue
            assert value.const_value is not None
            key = (value.name or "", self._shards.key(axes))
            if key not in self._made:
                name = f"{value.name}/rank{self._rank}"
                while name in self._graph.initializers:
                    name += "'"
                self._made[key] = self._register(self._shards.weight(value.const_value, axes, name))
                mark_part(self._made[key], value, self._shards.places(axes))
            node.replace_input_with(number, self._made[key])

    def _say_parts(self, node: ir.Node, operation: Operation) -> None:
        """A Split into equal parts whose sizes are not equal on the rank says them."""
        axis = node.attributes.get_int("axis", 0)
        sizes = [self._shards.size(axes[axis]) for axes in operation.outputs if axes is not None]
        if len(set(sizes)) == 1:
            return
        node.attributes.pop("num_outputs", None)
        if self._graph.opset_imports.get("", 17) < 13:
            node.attributes["split"] = ir.AttrInt64s("split", sizes)
        else:
            node.resize_inputs(2)
            node.replace_input_with(1, self._constant(np.array(sizes, np.int64)))

    def _look_up(self, node: ir.Node, operation: Operation) -> ir.Value:
        """Pick the rows that the rank has, and zeros for the others: a part of the sum over all ranks.

        A list says for each row of the whole table where it would be in the rank's part. To look an index up in it
        means what it did in the table: below 0 it counts from the end, and one that is out of bounds fails.
        """
        (atom,) = ax.leaves(operation.contracted)
        part, indices, rows = self._shards.ranges[atom], node.inputs[1], node.outputs[0]
        assert indices is not None and indices.dtype is not None and rows.dtype is not None
        kind = indices.dtype.numpy()

        def before(operator: str, *inputs: ir.Value) -> ir.Value:
            new = ir.node(operator, inputs)
            self._graph.insert_before(node, new)
            return new.outputs[0]

        places = np.clip(np.arange(atom.size) - part.start, -1, part.size).astype(kind)
        shifted = before("Gather", self._constant(places), indices)
        zero, last = self._constant(np.array(0, kind)), self._constant(np.array(part.size - 1, kind))
        inside = before("Clip", shifted, zero, last)
        mask = before("Unsqueeze", before("Equal", shifted, inside), self._constant(np.array([-1], np.int64)))
        node.replace_input_with(1, inside)
        nothing = self._constant(np.array(0, rows.dtype.numpy()))
        return self._wrap(rows, "Where", [mask, rows, nothing], "any")

    def _quantize_together(self, node: ir.Node) -> None:
        """DynamicQuantizeLinear of a part, with the scale and zero point of the whole (as ONNX defines them)."""
        data, outputs = node.inputs[0], node.outputs
        assert data is not None
        number = np.float32

        def op(kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
            new = ir.node(kind, inputs, attributes)
            self._graph.insert_before(node, new)
            new.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
            return new.outputs[0]

        zero, last = self._constant(np.array(0, number)), self._constant(np.array(255, number))
        one, shape = self._constant(np.array(1, number)), self._constant(np.array([1], np.int64))
        ends = [op("ReduceMax", each, keepdims=0) for each in (data, op("Neg", data))]
        part = op("Concat", *(op("Reshape", end, shape) for end in ends), axis=0)
        whole = op(COLLECTIVE, part, **self._all_reduce("max"))
        # Ranks must agree on these names.
        part.name, whole.name = f"{outputs[0].name}/range/part", f"{outputs[0].name}/range"
        first, second = (self._constant(np.array(index, np.int64)) for index in (0, 1))
        top = op("Max", op("Gather", whole, first, axis=0), zero)
        bottom = op("Max", op("Gather", whole, second, axis=0), zero)
        extent = op("Add", top, bottom)
        scale = op("Where", op("Equal", extent, zero), one, op("Div", extent, last))
        places = op("Round", op("Min", op("Div", bottom, scale), last))
        point = op("Cast", places, to=ir.DataType.UINT8)
        quantized = op("QuantizeLinear", data, scale, point)
        for old, new in zip(outputs, (quantized, scale, point)):
            new.name, new.type, old.name = old.name, old.type, f"{old.name}/unused"
            old.replace_all_uses_with(new, replace_graph_outputs=True)

    def _wrap(
        self, old: ir.Value, operator: str, inputs: Sequence[ir.Value | None], suffix: str, **attributes: Any
    ) -> ir.Value:
        """Put a node behind a value: its result takes the value's name and readers, the value gets a `suffix`."""
        uses = list(old.uses())
        node = ir.node(operator, inputs, attributes)
        producer = old.producer()
        assert producer is not None
        self._graph.insert_after(producer, node)
        new = node.outputs[0]
        name, old.name = old.name, f"{old.name}/{suffix}"
        new.name, new.type, new.shape = name, old.type, old.shape
        for user, number in uses:
            user.replace_input_with(number, new)
        for number, value in enumerate(self._graph.outputs):
            if value is old:
                self._graph.outputs[number] = new
        return new

    def _add_once(self, node: ir.Node, original: ir.Node, operation: Operation) -> ir.Value | None:
        """Leave out what another rank adds to the sum; a new value where the node had to be another one."""
        once = self._split.choice.sums.once.get(original, frozenset())
        if not once or self._split.adds(self._rank, operation):
            return None
        operator = operator_of(node)
        if chosen_atoms([operation.contracted], self._split.ranges):
            inputs = [None if number in once else value for number, value in enumerate(node.inputs)]
            while inputs and inputs[-1] is None:
                inputs.pop()
            gone = {operator.factors.get(number) for number in once}
            attributes = [attribute for name, attribute in node.attributes.items() if name not in gone]
            return self._replace(node, ir.Node(node.domain, node.op_type, inputs, attributes, name=node.name))
        kept = {number: value for number, value in enumerate(node.inputs) if number not in once}
        if len(kept) > 1:
            return self._replace(node, ir.node(node.op_type, list(kept.values())))
        ((number, value),) = kept.items()
        return self._replace(node, ir.node("Neg" if number in operator.negates else "Identity", [value]))

    def _replace(self, node: ir.Node, replacement: ir.Node) -> ir.Value:
        old, new = node.outputs[0], replacement.outputs[0]
        new.name, new.type, new.shape = old.name, old.type, old.shape
        self._graph.insert_before(node, replacement)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        self._graph.remove(node, safe=True)
        return new

    def _say_outputs(self) -> None:
        """Sizes of parts that are outputs become those of whole values."""
        for number, value in enumerate(self._graph.outputs):
            if value in self._sizes.read:
                self._graph.outputs[number] = self._sizes.globalize_output(value)

    def _fit_shape(self, value: ir.Value) -> None:
        """Of the sizes that the file says of a value those of the rank's part."""
        axes = self._axes(value)
        if value.shape is not None and axes is not None and self._shards.splits(axes):
            sizes = [self._shards.size(a) if isinstance(s, int) else s for s, a in zip(value.shape, axes)]
            value.shape = ir.Shape(sizes)

    def _name_new(self) -> None:
        for number, node in enumerate(self._graph):
            for place, value in enumerate(node.outputs):
                if value.name is None:
                    node.name = f"splitc_{node.op_type}_{number}"
                    value.name = f"{node.name}_{place}"


def _find_leaf(operation: Operation, leaf: Factor) -> tuple[int, int]:
    """The first input, and its axis, that has what a node sums over."""
    return next(
        (number, place)
        for number, axes in enumerate(operation.inputs)
        for place, axis in enumerate(axes or ())
        if leaf in ax.leaves(axis)
    )
