"""Edits a graph: adds constants, inserts nodes, replaces nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.lazy_tensors import CutTensor
from splitc.compiler.graphs.origins import hand_over, origin_of, put_behind, stand_for
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.nodes import unused_name
from splitc.runtime.arrays.array import Array

# The first opset with the operator Where.
WHERE = 9
# The first opset in which an operator takes lists of numbers as inputs. Before, they are attributes.
LISTS_AS_INPUTS = {
    "Slice": 10,
    "Pad": 11,
    "ReduceSum": 13,
    "Squeeze": 13,
    "Split": 13,
    "Unsqueeze": 13,
    "ReduceMax": 18,
    "ReduceMean": 18,
    "ReduceSumSquare": 18,
}


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer of a graph, with the name, type and shape of a tensor."""
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def describe(value: ir.Value, name: str, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
    """Set a new value's name, type and shape."""
    value.name, value.shape = name, shape
    value.type = None if dtype is None else ir.TensorType(dtype)


class Editor:
    """A graph while it is rewritten. A value that replaces another one takes over its name."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        # Added initializers by content, so that equal ones are shared.
        self._added: dict[tuple[str, bytes], ir.Value] = {}

    def constant(self, array: Array) -> ir.Value:
        """A small constant as an initializer."""
        key = (f"{array.dtype}{array.shape}", array.tobytes())
        known = self._added.get(key)
        if known is None or self.graph.initializers.get(known.name or "") is not known:  # or it was removed as unused
            name = unused_name(f"splitc_constant_{len(self._added)}", self.graph.initializers)
            self._added[key] = add_initializer(self.graph, ir.Tensor(array, name=name))
        return self._added[key]

    def name(self, named: ir.Value | ir.Node, name: str | None) -> None:
        """Give a new value or node a name, or a similar one if another has it, also in a subgraph."""
        named.name = unused_name(name, self._names)
        self._names.add(named.name)

    @cached_property
    def _names(self) -> set[str | None]:
        """The names of the graph's nodes and values, also of those in subgraphs."""
        named = (one for node in all_nodes(self.graph) for one in (node, *node.inputs, *node.outputs))
        return {one.name for one in named if one is not None}

    def numbers(self, *numbers: int) -> ir.Value:
        """A list of integers, such as sizes, as a constant."""
        return self.constant(np.array(numbers, np.int64))

    def scalar(self, number: float, like: ir.Value) -> ir.Value:
        """A scalar constant of the same type as `like`, or float32 if that is not known."""
        return self.constant(np.array(number, like.dtype.numpy() if like.dtype is not None else np.float32))

    def lists(self, operator: str, **lists: Sequence[int]) -> tuple[list[ir.Value], dict[str, Any]]:
        """An operator's lists of numbers, as (inputs after its data, attributes): which of them, the opset decides."""
        if self.graph.opset_imports.get("", 17) < LISTS_AS_INPUTS[operator]:
            return [], lists
        return [self.numbers(*numbers) for numbers in lists.values()], {}

    def set_lengths(self, split: ir.Node, lengths: Sequence[int]) -> None:
        """Give a Split explicit lengths of its parts."""
        split.attributes.pop("num_outputs", None)
        inputs, attributes = self.lists("Split", split=lengths)
        for name, numbers in attributes.items():
            split.attributes[name] = ir.AttrInt64s(name, numbers)
        for number, value in enumerate(inputs, 1):
            split.resize_inputs(1 + number)
            split.replace_input_with(number, value)

    def find(self, key: tuple[str, bytes]) -> ir.Value | None:
        """An initializer that was added under this key."""
        return self._added.get(key)

    def add(self, key: tuple[str, bytes], tensor: ir.TensorProtocol) -> ir.Value:
        """A new initializer, which `find` returns for this key."""
        self._added[key] = add_initializer(self.graph, tensor)
        return self._added[key]

    def weight(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A new initializer with the name of a tensor, or a similar one if that is taken."""
        tensor.name = unused_name(tensor.name, self.graph.initializers)
        return self.add((tensor.name, b""), tensor)

    def part_of(self, weight: ir.Value, axis: int, places: slice) -> ir.Value:
        """A new initializer: a weight sliced to `places` along an axis. It is read when it is written to a file."""
        tensor = weight.const_value
        assert tensor is not None
        shape = [*tensor.shape.numpy()]
        shape[axis] = places.stop - places.start
        name = f"{weight.name}[{places.start}:{places.stop}]"
        return self.weight(CutTensor(tensor, {axis: places}, ir.Shape(shape), name))

    def before(
        self,
        node: ir.Node,
        operator: str,
        *inputs: ir.Value | None,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Insert a new node right before `node`, perhaps in a branch. Returns its result, of this type if given."""
        new = ir.node(operator, inputs, attributes, domain=domain)
        node.prepend(new)
        new.outputs[0].type = None if dtype is None else ir.TensorType(dtype)
        return new.outputs[0]

    def wrap(
        self,
        old: ir.Value,
        operator: str,
        inputs: Sequence[ir.Value | None],
        suffix: str,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Insert a node after the producer of a value. Its result replaces the value and takes over its name.

        The `suffix` is appended to the old value's name. The result has the old value's type, unless `dtype` is given.
        """
        node = ir.node(operator, inputs, attributes)
        producer_of(old).append(node)
        new = node.outputs[0]
        hand_over(old, new, suffix)
        new.shape, new.type = old.shape, new.type if dtype is None else ir.TensorType(dtype)
        put_behind(node, old)
        return new

    def replace(self, node: ir.Node, replacement: ir.Node) -> ir.Value:
        """Replace a node, perhaps in a branch, by another one, each with one result. Returns the new result."""
        (old,), (new,) = node.outputs, replacement.outputs
        stand_for(new, origin_of(old))
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], [replacement], [old], [new])
        return new
