"""Edit a rank's graph: constants, nodes behind values, nodes in the place of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.origins import hand_over, origin_of, stand_for


class Editor:
    """The graph of one rank while it is rewritten. What takes the place of a value has its name from then on."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        # Initializers that were added, by what they hold: equal ones are one.
        self._added: dict[tuple[str, bytes], ir.Value] = {}

    def constant(self, array: npt.NDArray[Any]) -> ir.Value:
        """A small constant as an initializer."""
        key = (f"{array.dtype}{array.shape}", array.tobytes())
        if key not in self._added:
            name = f"splitc_constant_{len(self._added)}"
            self._added[key] = self._register(ir.Tensor(array, name=name))
        return self._added[key]

    def scalar(self, number: float, like: ir.Value) -> ir.Value:
        """A constant of another value's type; float32 where that is not known."""
        return self.constant(np.array(number, like.dtype.numpy() if like.dtype is not None else np.float32))

    def find(self, key: tuple[str, bytes]) -> ir.Value | None:
        """An initializer that was added under this key."""
        return self._added.get(key)

    def add(self, key: tuple[str, bytes], tensor: ir.TensorProtocol) -> ir.Value:
        """A new initializer, to be found by this key."""
        self._added[key] = self._register(tensor)
        return self._added[key]

    def free_name(self, name: str) -> str:
        """The name, or one like it, that no initializer has."""
        while name in self.graph.initializers:
            name += "'"
        return name

    def _register(self, tensor: ir.TensorProtocol) -> ir.Value:
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def before(self, node: ir.Node, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """What a new node makes, right before another one."""
        new = ir.node(operator, inputs, attributes)
        self.graph.insert_before(node, new)
        return new.outputs[0]

    def wrap(
        self, old: ir.Value, operator: str, inputs: Sequence[ir.Value | None], suffix: str, **attributes: Any
    ) -> ir.Value:
        """Put a node behind a value: its result takes the value's place, whose name gets a `suffix`."""
        uses = list(old.uses())
        node = ir.node(operator, inputs, attributes)
        producer = old.producer()
        assert producer is not None
        self.graph.insert_after(producer, node)
        new = node.outputs[0]
        hand_over(old, new, suffix)
        new.shape = old.shape
        for user, number in uses:
            user.replace_input_with(number, new)
        for number, value in enumerate(self.graph.outputs):
            if value is old:
                self.graph.outputs[number] = new
        return new

    def replace(self, node: ir.Node, replacement: ir.Node) -> ir.Value:
        """Put a node of one result in the place of another one."""
        (old,), (new,) = node.outputs, replacement.outputs
        stand_for(new, origin_of(old))
        ir.convenience.replace_nodes_and_values(self.graph, node, [node], [replacement], [old], [new])
        return new
