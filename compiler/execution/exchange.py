"""A rank's graph with its communication nodes, which tokens keep in order, as in the engine's file."""

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
    """Nodes in the file's order, communication included, and the values that each reads.

    - `came`: replacements for values of the model: joined columns, received values, and sums.
    - `bytes`: the sizes of all values that communication nodes make.
    - `aliases`: values in the memory of others: what was sent, and sums that overwrite the rank's part.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    came: Mapping[ir.Value, ir.Value]
    bytes: Mapping[ir.Value, int]
    aliases: Mapping[ir.Value, ir.Value]
