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
    """Nodes with those that send, receive and join, in the order of a file, and what each reads.

    `came` are the values that are made of columns, by the product whose results they are, and those that the main rank
    sent. `bytes` are those of columns, tokens and of what came. `aliases` are what was sent, by the name that products
    read it by.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    came: Mapping[ir.Value, ir.Value]
    bytes: Mapping[ir.Value, int]
    aliases: Mapping[ir.Value, ir.Value]
