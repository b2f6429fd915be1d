"""What an engine runs, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.execution.liveness import Reads, Size
from splitc.compiler.execution.rounds import Round
from splitc.compiler.operators.operator import Shapes

# Whether two values have the same shape in each request, as far as the file says.
Alike = Callable[[ir.Value, ir.Value], bool]
# The shapes of a node's inputs and outputs.
NodeShapes = Callable[[ir.Node], tuple[Shapes, Shapes]]


@dataclass(frozen=True)
class EngineGraph:
    """The nodes of an engine, in a file's order, what each reads, and the bytes of what they make.

    Values that leave the engine are `kept`. Of `summed` values the rank makes a part, and then the sum over ranks.
    `rounds` are those of row mode's main rank. With `shapes` images may be in blocks of channels.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    size: Size
    kept: AbstractSet[ir.Value]
    alike: Alike = lambda one, other: False
    summed: Container[ir.Value] = frozenset()
    rounds: Sequence[Round] = ()
    shapes: NodeShapes | None = None

    @cached_property
    def _sliced(self) -> frozenset[ir.Node]:
        return frozenset(node for one in self.rounds for node in one.products)

    def is_summed(self, node: ir.Node) -> bool:
        """Whether a node's result is summed over ranks."""
        return any(value in self.summed for value in node.outputs)

    def stays_alone(self, node: ir.Node) -> bool:
        """Whether a node makes a part of what all ranks make, and so becomes part of no other node."""
        return node in self._sliced or self.is_summed(node)
