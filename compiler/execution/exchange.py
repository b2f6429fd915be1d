"""A rank's graph with its communication nodes, which tokens keep in order, as in the engine's file.

Here also for tensor mode, whose communication are all-reduces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.execution.liveness import Alike, Reads, Size

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


def with_sums(
    nodes: Sequence[ir.Node], reads: Reads, size: Size, summed: Mapping[ir.Value, ir.Value], alike: Alike
) -> Exchange:
    """The graph of a rank that all-reduces the `summed` values.

    The rank's part is the value that its own node makes. Where that node would only pass on its input, the part is the
    input. A sum overwrites a part that was made for it, if the file says how large it is.
    """
    if not summed:
        return Exchange(nodes, reads, {}, {}, {})
    ordered, own = list[ir.Node](), dict[ir.Node, list[ir.Value]]()
    came, bytes_, aliases = dict[ir.Value, ir.Value](), dict[ir.Value, int](), dict[ir.Value, ir.Value]()
    token: list[ir.Value] = []
    for node in nodes:
        sums = [value for value in node.outputs if value in summed]
        if all(summed[value] is value for value in sums):
            ordered.append(node)
        for value in sums:
            part = summed[value]
            reduction = ir.Node(DOMAIN, "AllReduce", (), [ir.AttrInt64("number", len(own))], num_outputs=2)
            whole = reduction.outputs[0]
            ordered.append(reduction)
            own[reduction] = [came.get(part, part), *token]
            token = [reduction.outputs[1]]
            came[value], bytes_[whole], bytes_[token[0]] = whole, size(value), TOKEN
            if part is value and alike(value, value):
                aliases[whole] = value

    def read(node: ir.Node) -> list[ir.Value]:
        return own[node] if node in own else [came.get(value, value) for value in reads(node)]

    return Exchange(ordered, read, came, bytes_, aliases)
