"""The graph that an engine runs, with the sizes of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import onnx_ir as ir

from splitc.compiler.execution.exchange import Round
from splitc.compiler.execution.liveness import Alike, Reads, Size
from splitc.compiler.operators.operator import Shapes

# The shapes of a node's inputs and outputs.
NodeShapes = Callable[[ir.Node], tuple[Shapes, Shapes]]


@dataclass(frozen=True)
class EngineGraph:
    """An engine's nodes in the file's order, the values that each reads, and the bytes of the values they make.

    - `kept`: values that leave the engine.
    - `summed`: values that are all-reduced; this rank makes its part of each.
    - `rounds`: those of a rank in row mode.
    - `exchanged`: the bytes of a value on its way between ranks, where engines hold half precision as single.
    - `shapes`: given if images may be in the blocked layout.
    - `same`: values that are replaced by others.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    size: Size
    kept: AbstractSet[ir.Value]
    alike: Alike = lambda one, other: False
    summed: Mapping[ir.Value, ir.Value] = field(default_factory=dict)
    rounds: Sequence[Round] = ()
    exchanged: Size | None = None
    shapes: NodeShapes | None = None
    same: Mapping[ir.Value, ir.Value] = field(default_factory=dict)
