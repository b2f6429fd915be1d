"""A rank's graph with the nodes that exchange values with other ranks, chained by tokens, as in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.execution.liveness import Reads

DOMAIN = "splitc"
# A token has one byte.
TOKEN = 1


@dataclass(frozen=True)
class Exchange:
    """Nodes with those that exchange values, in the order of a file, and what each reads.

    `came` has what is read in the place of values of the model: joined columns, what another rank sent, and sums.
    `bytes` are those of all that such nodes make. `aliases` lie in another value's memory: what was sent, and sums that
    overwrite the rank's part.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    came: Mapping[ir.Value, ir.Value]
    bytes: Mapping[ir.Value, int]
    aliases: Mapping[ir.Value, ir.Value]
