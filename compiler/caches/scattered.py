"""Replaces the ScatterND that writes a cache between transposes by ScatterElements, which can write it in place.

To write rows along an inner axis, torch's exporter transposes the axis to the front, writes, and transposes back: three
copies of the cache for each token. ScatterElements writes along any axis.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.matching import is_onnx, made_by, only_user
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.kernels import check_type
from splitc.compiler.patterns.operand import Operand, traced_back
from splitc.compiler.patterns.sizes import fixed_axis
from splitc.compiler.patterns.writing import Writer

OPERATOR = "ScatterElements"


def is_assignment(node: ir.Node) -> bool:
    """Whether a node is a ScatterND that overwrites elements."""
    return is_onnx(node, "ScatterND") and node.attributes.get_string("reduction", "none") == "none"


def fuse_scattered(node: ir.Node, context: Context) -> str | None:
    """Write a cache by index without transposing it. Returns the operator; None if the node writes no cache.

    Raises NotFusedError if the operator can't express the ScatterND; then nothing is changed.
    """
    if not context.gains.scattered or not is_assignment(node):
        return None
    data, places, rows = node.inputs
    turn = made_by(data, "Transpose")
    back = only_user(node.outputs[0], "Transpose")
    if data is None or places is None or rows is None or turn is None or back is None:
        return None
    if only_user(data, node.op_type) is not node:
        return None
    order, last = (list(one.attributes.get_ints("perm", ())) for one in (turn, back))
    past, present = turn.inputs[0], back.outputs[0]
    if not order or [order[axis] for axis in last] != list(range(len(order))):
        return None
    if past is None or not past.is_graph_input() or past.name not in context.pasts or not present.is_graph_output():
        return None
    check_type(past, context.gains.scattered)
    sizes, along = context.sizes, order[0]
    axes, listed = sizes.axes(past), sizes.axes(places)
    if axes is None or listed is None or sizes.axes(rows) is None:
        raise NotFusedError("the shape of its cache is not known")
    if len(listed) != 2 or listed[1].fixed != 1:
        raise NotFusedError("its cache is written along several axes")
    written = [listed[0] if axis == along else size for axis, size in enumerate(axes)]
    thin = [listed[0] if axis == along else fixed_axis(1) for axis in range(len(axes))]
    work = Writer.of(present, context, past, places)
    with work.undone_if_refused():
        turned = work.transpose(traced_back(Operand(rows, tuple(last))), "rows")
        indices = work.expand(work.reshape(places, thin, "places"), written, "indices")
    work.take_place(work.add("written", OPERATOR, [past, indices, turned], past, axes, axis=along), present)
    return OPERATOR
