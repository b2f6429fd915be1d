"""How to make up sensible arrays for a model's inputs, from what the graph does with them."""

from __future__ import annotations

import onnx_ir as ir

from splitc.runtime.manifest import Fill

# Operators whose input picks rows of another one: the input's number, and that of what it picks from.
LOOKUPS = {
    "Gather": ((1, 0),),
    "GatherElements": ((1, 0),),
    "EmbedLayerNormalization": ((0, 2), (1, 4)),
    "GatherBlockQuantized": ((1, 0),),
}
# Operators that hand indices on.
PASSING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Expand"})


def find_fill(value: ir.Value) -> Fill:
    """How to fill the input `value`.

    Indices stay below the rows of the tables that they pick from. Other integers are ones, as masks want it, but
    positions count up; floating point numbers are normally distributed, but masks are ones.
    """
    rows = _rows_picked_from(value)
    if rows:
        return Fill("index", below=min(rows))
    name = (value.name or "").lower()
    if "position" in name:
        return Fill("positions")
    if "mask" in name or value.dtype is None or not value.dtype.is_floating_point():
        return Fill("ones")
    return Fill("normal")


def _rows_picked_from(value: ir.Value) -> list[int]:
    """The rows of each table of known size that `value` indexes."""
    rows = []
    stack, seen = [value], {value}
    while stack:
        for node, number in stack.pop().uses():
            for indices, table in LOOKUPS.get(node.op_type, ()):
                source = node.inputs[table]
                if number == indices and source is not None and source.shape:
                    size = source.shape[node.attributes.get_int("axis", 0)]
                    rows += [size] if isinstance(size, int) else []
            if node.op_type in PASSING and number == 0 and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                stack.append(node.outputs[0])
    return rows
