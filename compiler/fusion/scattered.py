"""Replaces the ScatterND that writes a cache between transposes by ScatterElements, which can write it in place.

To write rows along an inner axis, torch's exporter transposes the axis to the front, writes, and transposes back: three
copies of the cache for each token. ScatterElements writes along any axis.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.matching import is_onnx, made_by, only_user
from splitc.compiler.fusion.errors import NotFusedError
from splitc.compiler.fusion.operand import Operand, traced_back
from splitc.compiler.fusion.sizes import Sizes, fixed_axis
from splitc.compiler.fusion.writing import Writer

OPERATOR = "ScatterElements"


@dataclass(frozen=True)
class Scattered:
    """A cache: `present` is `past` with `rows` written along `axis`, at the `indices` [rows, 1]."""

    past: ir.Value
    indices: ir.Value
    rows: Operand
    axis: int
    present: ir.Value


def find_scattered(node: ir.Node, states: Collection[str]) -> Scattered | None:
    """The cache that a ScatterND writes between transposes; None if it is none of `states`, names of inputs."""
    if not is_onnx(node, "ScatterND") or node.attributes.get_string("reduction", "none") != "none":
        return None
    data, indices, rows = node.inputs
    turn = made_by(data, "Transpose")
    back = only_user(node.outputs[0], "Transpose")
    if data is None or indices is None or rows is None or turn is None or back is None:
        return None
    if only_user(data, node.op_type) is not node:
        return None
    order, last = (list(one.attributes.get_ints("perm", ())) for one in (turn, back))
    past, present = turn.inputs[0], back.outputs[0]
    if not order or [order[axis] for axis in last] != list(range(len(order))):
        return None
    if past is None or not past.is_graph_input() or past.name not in states or not present.is_graph_output():
        return None
    return Scattered(past, indices, Operand(rows, tuple(last)), order[0], present)


def write_scattered(scattered: Scattered, editor: Editor, sizes: Sizes) -> None:
    """Replace the nodes by ScatterElements, in place.

    Raises NotFusedError if it can't express them; then nothing is changed.
    """
    past, present = scattered.past, scattered.present
    axes, places = sizes.axes(past), sizes.axes(scattered.indices)
    if axes is None or places is None or sizes.axes(scattered.rows.value) is None:
        raise NotFusedError("the shape of its cache is not known")
    if len(places) != 2 or places[1].fixed != 1:
        raise NotFusedError("its cache is written along several axes")
    own = [places[0] if axis == scattered.axis else size for axis, size in enumerate(axes)]
    work = Writer.of(present, (past, scattered.indices), editor, sizes)
    with work.undone_if_refused():
        rows = work.transpose(traced_back(scattered.rows, scaled=False), "rows")
        listed = [places[0] if axis == scattered.axis else fixed_axis(1) for axis in range(len(axes))]
        indices = work.expand(work.reshape(scattered.indices, listed, "places"), own, "indices")
    made = work.add("written", OPERATOR, [past, indices, rows], past, axes, axis=scattered.axis)
    work.take_place(made, present)
