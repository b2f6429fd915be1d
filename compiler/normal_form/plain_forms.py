"""Writes nodes in the form that most exporters write, where another one does the same: passes match only that form.

Which form it is follows from the sizes, so these are known first. XLA's exporters write slices with bounds for all
axes; repeated heads as a Gather of indices 0, 0, 1, 1; and a lookup of rows as GatherND. TensorFlow's write dense
layers as products of two axes. Means and norms: see `normal_form.plain_norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import WHERE, Editor
from splitc.compiler.graphs.matching import (
    VIEWS,
    constant,
    constant_numbers,
    input_orders,
    made_by,
    only_user,
    readers_of,
    value_before,
)
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.nodes import known_tensor
from splitc.compiler.normal_form import plain_norms as norms
from splitc.compiler.normal_form.constants import ANY_END, bypass
from splitc.compiler.normal_form.plain_norms import added_axes, factors, is_known, size_of


def use_plain_forms(graph: ir.Graph) -> bool:
    """Rewrite nodes whose sizes are inferred, in place. Returns whether there were any: others may follow from them."""
    editor, is_changed, first = Editor(graph), False, dict[Hashable, ir.Value]()
    for node in [node for node in graph if not node.domain]:
        key, made = norms.mean_key(node), node.outputs[0]
        if key is not None and first.setdefault(key, made) is not made:
            is_changed = bypass(graph, node, first[key]) or is_changed
        else:
            is_changed = any(rule(node, editor) for rule in _RULES.get(node.op_type, ())) or is_changed
    if is_changed:
        remove_unused(graph)
    return is_changed


def _trim_slice(node: ir.Node, editor: Editor) -> bool:
    """Leave the axes out of a Slice's lists of which it takes all."""
    data, *lists = node.inputs
    starts, ends, axes, steps = map(constant_numbers, [*lists, None, None, None, None][:4])
    if data is None or data.shape is None or not starts or not ends or (axes is None and len(lists) > 2):
        return False
    places, steps = axes or list(range(len(starts))), steps or ([1] * len(starts) if len(lists) < 4 else [])
    bounds = list(zip(starts, ends, places, steps, strict=False))
    cut = [(start, end, at, step) for start, end, at, step in bounds if not _takes_all(data, start, end, at, step)]
    if len(cut) == len(bounds) or len(bounds) != len(starts):
        return False
    if not cut:
        return bypass(editor.graph, node, data)
    node.resize_inputs(5)
    for number, column in enumerate(zip(*cut, strict=True), start=1):
        node.replace_input_with(number, editor.numbers(*column))
    return True


def _state_lengths(node: ir.Node, editor: Editor) -> bool:
    """State the lengths of a Split's parts, which differ if the parts are sharded along axes of different sizes.

    Those of one element, as of stacked experts, never differ.
    """
    axis, stated = node.attributes.get_int("axis", 0), node.inputs[1] if len(node.inputs) > 1 else None
    lengths = [length for made in node.outputs if (length := size_of(made, axis)) is not None]
    if stated is not None or "split" in node.attributes or len(lengths) < len(node.outputs) or {*lengths} == {1}:
        return False
    editor.set_lengths(node, lengths)
    return True


def _takes_all(data: ir.Value, start: int, end: int, axis: int, step: int) -> bool:
    size = size_of(data, axis)
    return start == 0 and step == 1 and (end >= ANY_END or (size is not None and end >= size))


def _restore(node: ir.Node, editor: Editor) -> bool:
    """Bypass views that end with the sizes they begin with."""
    made, value = node.outputs[0], node.inputs[0]
    while value is not None:
        if is_known(value.shape) and value.shape == made.shape:
            return bypass(editor.graph, node, value)
        value = value_before(value, *VIEWS)
    return False


def _skip_neutral(node: ir.Node, editor: Editor) -> bool:
    """Bypass a product with 1, and a sum with 0: Paddle's scaling writes both, whether or not it scales."""
    neutral = node.op_type in ("Mul", "Div")
    for value, number in input_orders(node):
        tensor = known_tensor(number)
        if value is None or tensor is None or constant(number) != neutral:
            continue
        if not tensor.shape or (value.shape is not None and len(tensor.shape) <= len(value.shape)):
            return bypass(editor.graph, node, value)
    return False


def _multiply_as_it_is(node: ir.Node, editor: Editor) -> bool:
    """Multiply a value by a matrix without the views that join its rows before, and bring their axes back behind."""
    product, made = made_by(node.inputs[0], "MatMul"), node.outputs[0].shape
    if product is None or only_user(product.outputs[0], node.op_type) is not node:
        return False
    flat, matrix = product.inputs
    data = value_before(flat, *VIEWS)
    if data is None or not is_known(data.shape) or not is_known(made) or matrix is None or matrix.shape is None:
        return False
    assert data.shape is not None
    assert made is not None
    if len(matrix.shape) != 2 or [*data.shape[:-1], matrix.shape[1]] != [*made] or data.shape[-1] != matrix.shape[0]:
        return False
    editor.replace(node, ir.node("MatMul", [data, matrix]))
    return True


def _broadcast_at_once(node: ir.Node, editor: Editor) -> bool:
    """Read an input before an Expand to the sizes of the other one, and of the result."""
    is_changed, made = False, node.outputs[0].shape
    for number in (0, 1):
        source, other = value_before(node.inputs[number], "Expand"), node.inputs[1 - number]
        if source is not None and other is not None and is_known(made) and other.shape == made:
            node.replace_input_with(number, source)
            is_changed = True
    return is_changed


def _choose(node: ir.Node, editor: Editor) -> bool:
    """Bypass a Where whose condition is a constant, the same for all elements."""
    condition = known_tensor(node.inputs[0])
    flags = np.array([]) if condition is None else condition.numpy().reshape(-1)
    if not flags.size or flags.any() != flags.all():
        return False
    chosen, made = node.inputs[1 if flags[0] else 2], node.outputs[0].shape
    return chosen is not None and is_known(made) and chosen.shape == made and bypass(editor.graph, node, chosen)


def _choose_by_mask(node: ir.Node, editor: Editor) -> bool:
    """Replace mask * a + (not mask) * b by a Where."""
    if editor.graph.opset_imports.get("", 17) < WHERE:
        return False
    for kept, other in input_orders(node):
        for negated, instead in _masked(other):
            negation = made_by(negated, "Not")
            for mask, data in _masked(kept):
                if negation is not None and negation.inputs[0] is mask and _is_finite(data) and _is_finite(instead):
                    editor.replace(node, ir.node("Where", [mask, data, instead]))
                    return True
    return False


def _is_finite(value: ir.Value) -> bool:
    """Whether a value is no constant that times zero is not zero."""
    tensor = known_tensor(value)
    return tensor is None or bool(np.isfinite(tensor.numpy()).all())


def _masked(value: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The mask of a product of a mask and data, before it was cast from booleans, and the data; none for others."""
    for number, data in factors(value):
        mask = value_before(number, "Cast")
        if mask is not None and mask.dtype == ir.DataType.BOOL:
            yield mask, data


def _count_in_integers(node: ir.Node, editor: Editor) -> bool:
    """Count by a Range of integers that is cast, if the end of a Range is cast: its size is known then."""
    first, end, step = node.inputs
    count = value_before(end, "Cast")
    numbers = [known_tensor(value) for value in (first, step)]
    if count is None or count.dtype is None or not count.dtype.is_integer() or end is None or end.dtype is None:
        return False
    if end.dtype.is_integer() or any(one is None or float(one.numpy()) % 1 for one in numbers):
        return False
    whole = [editor.constant(np.array(one.numpy(), count.dtype.numpy())) for one in numbers if one is not None]
    counted = editor.before(node, "Range", whole[0], count, whole[1], dtype=count.dtype)
    editor.replace(node, ir.node("Cast", [counted], {"to": end.dtype}))
    return True


def _select(node: ir.Node, editor: Editor) -> bool:
    """Replace a Gather of a range of an axis, or one that takes each of its elements several times."""
    data, indices = node.inputs
    numbers = constant_numbers(indices)
    if data is None or data.is_initializer() or data.shape is None or not numbers or indices is None:
        return False
    axis = node.attributes.get_int("axis", 0) % len(data.shape)
    size, first = size_of(data, axis), numbers[0]
    if not size or indices.shape is None or len(indices.shape) != 1:
        return False
    if data.dtype is None or not data.dtype.is_floating_point():
        return False
    if numbers == [*range(first, first + len(numbers))] and 0 <= first <= size - len(numbers):
        lists, attributes = editor.lists("Slice", starts=[first], ends=[first + len(numbers)], axes=[axis])
        editor.replace(node, ir.node("Slice", [data, *lists], attributes))
        return True
    times = len(numbers) // size
    if times < 2 or numbers != np.repeat(np.arange(size), times).tolist():
        return False
    _repeat(node, data, axis, size, times, editor)
    return True


def _repeat(node: ir.Node, data: ir.Value, axis: int, size: int, times: int, editor: Editor) -> None:
    """Replace a node that repeats each element of an axis of a `size` by an Expand of an axis behind it."""
    assert data.shape is not None
    sizes, ones = editor.before(node, "Shape", data), [1] * (len(data.shape) - axis - 1)
    lists, attributes = editor.lists("Unsqueeze", axes=[axis + 1])
    apart = editor.before(node, "Unsqueeze", data, *lists, **attributes)
    more = editor.before(node, "Expand", apart, editor.numbers(times, *ones))
    parts = []
    for start, end in ((0, axis), (axis + 1, ANY_END)):  # the sizes before the axis, and those after it
        lists, attributes = editor.lists("Slice", starts=[start], ends=[end])
        parts.append(editor.before(node, "Slice", sizes, *lists, **attributes))
    shape = editor.before(node, "Concat", parts[0], editor.numbers(size * times), parts[1], axis=0)
    editor.replace(node, ir.node("Reshape", [more, shape]))


def _look_up(node: ir.Node, editor: Editor) -> bool:
    """Replace a GatherND of rows by a Gather."""
    data, places = node.inputs
    has_batches = node.attributes.get_int("batch_dims", 0) != 0
    if places is None or places.shape is None or has_batches or size_of(places, -1) != 1:
        return False
    apart, last = made_by(places, "Unsqueeze"), len(places.shape) - 1
    rows = apart.inputs[0] if apart is not None and added_axes(apart, last + 1) == {last} else None
    if rows is None:
        lists, attributes = editor.lists("Squeeze", axes=[last])
        rows = editor.before(node, "Squeeze", places, *lists, **attributes)
    editor.replace(node, ir.node("Gather", [data, rows], {"axis": 0}))
    return True


def _read_before(node: ir.Node, editor: Editor) -> bool:
    """Read the sizes of a transposed value before its Transpose, if nothing reads the value itself."""
    turned, made = node.inputs[0], node.outputs[0]
    transpose = made_by(turned, "Transpose")
    order = () if transpose is None else transpose.attributes.get_ints("perm", ())
    if turned is None or transpose is None or not order or turned.is_graph_output() or readers_of(turned):
        return False
    places = order[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(order))]
    sizes = editor.before(node, "Shape", transpose.inputs[0], dtype=made.dtype)
    editor.replace(node, ir.node("Gather", [sizes, editor.numbers(*places)]))
    return True


_RULES: Mapping[str, Sequence[Callable[[ir.Node, Editor], bool]]] = {
    "Slice": [_trim_slice],
    "Split": [_state_lengths],
    "Unsqueeze": [_restore, norms.keep_axes],
    "Reshape": [_restore, norms.keep_axes, _multiply_as_it_is],
    "Expand": [_restore],
    "Range": [_count_in_integers],
    "Where": [_choose],
    "Squeeze": [_restore],
    "Flatten": [_restore],
    "Gather": [_select],
    "GatherND": [_look_up],
    "Shape": [_read_before],
    "Div": [_skip_neutral, norms.average, norms.scale_last, _broadcast_at_once],
    "Mul": [_skip_neutral, norms.average, norms.divide_first, norms.scale_last, _broadcast_at_once],
    "Pow": [norms.take_root],
    "GlobalAveragePool": [norms.average_last],
    "Sub": [_skip_neutral, norms.center_squares, _broadcast_at_once],
    "Max": [norms.skip_bound],
    "Clip": [norms.skip_bound],
    "Relu": [norms.skip_bound],
    "Add": [_skip_neutral, norms.center_first, _choose_by_mask, _broadcast_at_once],
}
