"""What an engine runs, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

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

    Values that leave the engine are `kept`. Ranks add `summed` values, each of which has this rank's part of it.
    `rounds` are those of a rank of row mode, and values are `exchanged` with other bytes where engines hold halves as
    singles. With `shapes` images may be in blocks of channels. Other values take the place of those in `same`.
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
