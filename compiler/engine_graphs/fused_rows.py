"""Fuses elementwise operators, norms and rotary embeddings into one kernel of our own, on GPUs in half precision.

Unfused, each of these operators reads and writes its data once. ONNX Runtime fuses some sequences of them, and its
kernels for norms and rotary embeddings reach a fraction of the memory bandwidth. On an H200, for the queries of
FLUX.1-dev (4,608 tokens of 24 heads of 128), a bias, an RMSNorm and a rotary embedding take 147 microseconds, and 23 as
one kernel; a LayerNorm takes 61, and 24.

A group is a node, and nodes before it whose results only the group reads. Each is a step of the kernel
(runtime/package/fused.py), which works on rows: a row is the last axis, or a head where a norm or a rotary embedding
works on heads. Reshapes are no steps: they move no data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec
import onnx_ir as ir
from msgspec.structs import replace

from splitc.compiler.engine_graphs.gpu_functions import DOMAIN, PROGRAM
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import VIEWS, is_onnx, made_by, value_before
from splitc.compiler.graphs.origins import described, noted_sizes, planned_shape, take_place
from splitc.compiler.inference.shapes import numbers_or_names
from splitc.compiler.nodes import MICROSOFT, inputs_of
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.request.shapes import Shape
from splitc.runtime.engines.fused_source import POINTWISE, WARP
from splitc.runtime.package.fused import INPUTS, LONGEST, ROTARY, STEPS, WIDTH, Fused, FusedInput, FusedStep, Half, Span

# The names of steps that differ from their operators' names.
NAMES = {"SimplifiedLayerNormalization": "RMSNormalization"}
NORMS = ("LayerNormalization", "RMSNormalization")
# The least elements of a result that is worth fusing. A choice: for fewer, a kernel takes about as long as its launch.
LEAST = 1 << 17
DTYPES: Mapping[ir.DataType, Half] = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
# The axes of an image: batch, channels, height and width.
IMAGE = 4

Sizes = tuple[int | str, ...]


class _NoStepError(Exception):
    """A node can't be a step of the group."""

    def __init__(self, node: ir.Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass
class _Group:
    """A group under construction.

    - `nodes`: the nodes that are its steps, in order.
    - `dtype`: the type of all its values.
    - `columns`: the elements of a row.
    - `shape`: the shape of the result, and of all inputs of span `all`.
    - `inputs`: the values that the kernel reads, each with the way in which it is read.
    """

    nodes: Sequence[ir.Node]
    dtype: ir.DataType
    columns: int
    shape: Sizes
    inputs: list[tuple[ir.Value, FusedInput]] = field(default_factory=list)
    steps: list[FusedStep] = field(default_factory=list)

    def read(self, value: ir.Value, span: Span, width: int) -> int:
        """The number of an input, which is added if it is new."""
        given = value, FusedInput(span, width)
        if given not in self.inputs:
            self.inputs.append(given)
        return self.inputs.index(given)


def fuse_rows(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace groups by one operator each, in place.

    `shapes` are those of the model's values. All nodes of the graph have readers; those without afterwards stay.
    """
    editor, gone = Editor(graph), set[ir.Node]()
    order = {node: number for number, node in enumerate(graph)}
    for node in reversed(order):
        if node in gone or not _is_step(node) or math.prod(planned_shape(node.outputs[0], shapes)) < LEAST:
            continue
        group = _grow(node, order, gone)
        if group is not None:
            gone.update(group.nodes)
            _write(group, editor)


def _step_name(node: ir.Node) -> str | None:
    """The name of the step that a node may be; None if it can't be one."""
    name = NAMES.get(node.op_type, node.op_type)
    if name == "Gelu" and node.attributes.get_string("approximate", "none") == "tanh":
        name = "GeluTanh"
    own = MICROSOFT if name in (ROTARY, "QuickGelu") else ""
    return name if node.domain == own and name in STEPS else None


def _is_step(node: ir.Node) -> bool:
    """Whether a node may be a step: an operator of `STEPS` with a result in half precision, of known sizes."""
    result = node.outputs[0] if node.outputs else None
    if result is None or _step_name(node) is None or described(result).dtype not in HALVES:
        return False
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return False
    columns = (_sizes(result) or (0,))[-1]
    return isinstance(columns, int) and columns > 0


def _sizes(value: ir.Value) -> Sizes | None:
    """A value's sizes on this rank, as numbers or symbols; None unless all are known."""
    return numbers_or_names(noted_sizes(value) if value.const_value is None else value.const_value.shape)


def _grow(root: ir.Node, order: Mapping[ir.Node, int], gone: set[ir.Node]) -> _Group | None:
    """The largest group that ends at a node and can be one kernel; None if no group is worth one.

    `order` numbers the graph's nodes. Nodes in `gone` are part of other groups already.
    """
    refused: set[ir.Node] = set()
    while root not in refused:
        nodes = sorted(_members(root, gone, refused), key=order.__getitem__)
        if len(nodes) == 1 and _step_name(root) in POINTWISE:
            return None
        try:
            group = _steps(nodes)
        except _NoStepError as error:
            refused.add(error.node)
            continue
        if len(group.inputs) <= INPUTS:
            return None if _moves_axes(group) else group
        refused.add(nodes[0])
    return None


def _moves_axes(group: _Group) -> bool:
    """Whether the group stands between Transposes of images, which ONNX Runtime would move together and remove."""
    if len(group.shape) < IMAGE or any(_step_name(node) not in POINTWISE for node in group.nodes):
        return False
    data = [value for value, given in group.inputs if given.span == "all"]
    readers = [node for node, _ in group.nodes[-1].outputs[0].uses()]
    return any(made_by(value, "Transpose") for value in data) or any(is_onnx(node, "Transpose") for node in readers)


def _members(root: ir.Node, gone: set[ir.Node], refused: set[ir.Node]) -> set[ir.Node]:
    """The node `root`, and nodes before it whose results only the group reads."""
    members, new, dtype = {root}, [root], described(root.outputs[0]).dtype
    while new:
        makers = {_behind_views(value)[-1].producer() for node in members for value in _data(node)}
        new = [
            node
            for node in makers
            if node is not None and node not in members and node not in refused and _is_step(node)
            if described(node.outputs[0]).dtype == dtype
            if members.issuperset(_readers(node.outputs[0], gone))
        ]
        members.update(new)
    return members


def _data(node: ir.Node) -> list[ir.Value]:
    """The inputs of a step that have the shape of its result."""
    shape = _sizes(node.outputs[0])
    inputs = inputs_of(node)
    if len(inputs) == 1 or _step_name(node) not in POINTWISE:
        return inputs[:1]
    return [value for value in inputs if _sizes(value) == shape]


def _behind_views(value: ir.Value) -> list[ir.Value]:
    """A value and the values that it is a Reshape of, the first one last."""
    chain = [value]
    while (before := value_before(chain[-1], *VIEWS)) is not None:
        chain.append(before)
    return chain


def _readers(value: ir.Value, gone: set[ir.Node]) -> Iterator[ir.Node | None]:
    """The nodes, not in `gone`, that read a value or a Reshape of it; None for an output of the graph."""
    if value.is_graph_output():
        yield None
    for node, place in value.uses():
        if is_onnx(node, *VIEWS) and place == 0:
            yield from _readers(node.outputs[0], gone)
        elif node not in gone:
            yield node


def _steps(nodes: Sequence[ir.Node]) -> _Group:
    """The group of these nodes. Raises _NoStepError for a node that can't be a step of it."""
    shape, dtype = _sizes(nodes[-1].outputs[0]), described(nodes[-1].outputs[0]).dtype
    assert shape is not None and dtype is not None
    group = _Group(nodes, dtype, _columns(nodes), shape)
    # Steps are numbered after the inputs, whose number is not known yet: until then step n is -1 - n.
    known: dict[ir.Value, int] = {}
    for node in nodes:
        name = _step_name(node)
        assert name is not None
        least, most, _ = STEPS[name]
        if not least <= len(node.inputs) <= most:
            raise _NoStepError(node)
        reads = [_read(group, node, place, known) for place in range(len(node.inputs))]
        known[node.outputs[0]] = -1 - len(group.steps)
        group.steps.append(FusedStep(name, reads, _numbers(node, name)))
    wholes = [number for number, (_, given) in enumerate(group.inputs) if given.span == "all"]
    if not wholes:
        raise _NoStepError(nodes[-1])
    # The first input has the result's shape, and steps are numbered after all inputs.
    first, count = wholes[0], len(group.inputs)
    group.inputs[0], group.inputs[first] = group.inputs[first], group.inputs[0]
    numbers = {first: 0, 0: first} | {-1 - step: count + step for step in range(len(group.steps))}
    group.steps = [replace(step, reads=[numbers.get(read, read) for read in step.reads]) for step in group.steps]
    return group


def _read(group: _Group, node: ir.Node, place: int, known: Mapping[ir.Value, int]) -> int:
    """The number of what a step reads at this place: one of the `known` steps, or an input, added to the group.

    Raises _NoStepError if the node has no such input, or it does not fit.
    """
    name, value = _step_name(node), node.inputs[place]
    if value is None:
        raise _NoStepError(node)
    if (place == 0 and name not in POINTWISE) or value in _data(node):
        original = _behind_views(value)[-1]
        return known[original] if original in known else _whole(group, node, value)
    if name == ROTARY:
        return group.read(value, *(("positions", 1) if place == 1 else ("table", group.columns // 2)))
    return group.read(value, *_span(group, node, value))


def _columns(nodes: Sequence[ir.Node]) -> int:
    """The elements of a row: what the norms and rotary embeddings work on, or else the shortest last axis.

    Raises _NoStepError for the first node that does not consist of such rows.
    """
    lengths = {node: _length(node) for node in nodes}
    needed = [length for node, length in lengths.items() if _step_name(node) not in POINTWISE]
    columns = needed[-1] if needed else min(lengths.values())
    for node, length in lengths.items():
        if length % columns or (length != columns and _step_name(node) not in POINTWISE):
            raise _NoStepError(node)
    if columns % WIDTH or not WIDTH < columns <= LONGEST:
        raise _NoStepError(nodes[-1])
    return columns


def _length(node: ir.Node) -> int:
    """The length of a step's rows. Raises _NoStepError for a rotary embedding that the kernel does not support."""
    shape = _sizes(node.outputs[0])
    assert shape is not None and isinstance(shape[-1], int)
    if _step_name(node) != ROTARY:
        return shape[-1]
    heads, size = node.attributes.get_int("num_heads", 0), shape[-1]
    others = (node.attributes.get_int(name, 0) for name in ("rotary_embedding_dim", "is_packed_batching"))
    half = size // max(heads, 1) // 2
    interleaved = node.attributes.get_int("interleaved", 0)
    # Elements of pairs that are not neighbors are exchanged between threads of a warp.
    fits = half % WIDTH == 0 and (interleaved or (half & (half - 1) == 0 and 2 * half <= WARP * WIDTH))
    if len(shape) != 3 or heads < 1 or size % heads or any(others) or not fits:
        raise _NoStepError(node)
    if node.attributes.get_float("scale", 1.0) != 1.0:
        raise _NoStepError(node)
    return size // heads


def _whole(group: _Group, node: ir.Node, value: ir.Value) -> int:
    """The number of an input that has the shape of a step's result, reshaped to that of the group's result."""
    view = next((view for view in _behind_views(value) if _sizes(view) == group.shape), value)
    own = _sizes(view)
    is_known = _sizes(node.outputs[0]) == group.shape if own is None else _view_of(own, group.shape) is not None
    if not is_known:
        raise _NoStepError(node)
    return group.read(view, "all", group.columns)


def _view_of(own: Sizes, shape: Sizes) -> list[int] | None:
    """The constant target by which a Reshape turns sizes `own` into `shape`; None if there is none."""
    same = list(takewhile(lambda pair: pair[0] == pair[1], zip(own, shape, strict=False)))
    sizes = [0] * len(same) + [size if isinstance(size, int) else -1 for size in shape[len(same) :]]
    return sizes if sizes.count(-1) <= 1 else None


def _span(group: _Group, node: ir.Node, value: ir.Value) -> tuple[Span, int]:
    """How an input is broadcast to the rows of a step's result: its span, and its width (1, or that of a row).

    Raises _NoStepError if it is neither repeated for the leading axes ("trailing") nor for the last ones ("leading").
    """
    whole, own = _sizes(node.outputs[0]), _sizes(value)
    if whole is None or own is None or described(value).dtype not in (None, group.dtype):
        raise _NoStepError(node)
    own = (1,) * (len(whole) - len(own)) + own
    is_wide = own[-1] == whole[-1]
    if any(size not in (1, full) for size, full in zip(own, whole, strict=True)):
        raise _NoStepError(node)
    # For each axis before a row: whether the input has it, or is broadcast along it.
    has = [size == full for size, full in zip(own[:-1], whole[:-1], strict=True) if full != 1]
    if whole[-1] != group.columns:
        has.append(is_wide)
    width = group.columns if is_wide else 1
    if has == sorted(has):
        return "trailing", width
    if has == sorted(has, reverse=True):
        return "leading", width
    raise _NoStepError(node)


def _numbers(node: ir.Node, name: str) -> dict[str, float]:
    if name in NORMS:
        if node.attributes.get_int("axis", -1) not in (-1, len(_sizes(node.outputs[0]) or ()) - 1):
            raise _NoStepError(node)
        return {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    if name == ROTARY:
        return {key: node.attributes.get_int(own, 0) for key, own in (("heads", "num_heads"), ("interleaved",) * 2)}
    return {"alpha": node.attributes.get_float("alpha", 1.702)} if name == "QuickGelu" else {}


def _write(group: _Group, editor: Editor) -> None:
    """Replace the group's last node by the fused operator."""
    last = group.nodes[-1]
    inputs = []
    for value, given in group.inputs:
        own = _sizes(value)
        if given.span == "all" and own != group.shape and own is not None:
            value = editor.before(last, "Reshape", value, editor.numbers(*(_view_of(own, group.shape) or ())))
        inputs.append(value)
    dtype = DTYPES[group.dtype]
    kernel = Fused("", group.columns, [given for _, given in group.inputs], group.steps, dtype)
    name = f"Rows_{hashlib.sha256(msgspec.json.encode(kernel)).hexdigest()[:16]}"
    how: dict[str, Any] = {PROGRAM: msgspec.json.encode(replace(kernel, name=name)).decode()}
    editor.graph.opset_imports.setdefault(DOMAIN, 1)
    take_place(editor.before(last, name, *inputs, domain=DOMAIN, **how), last.outputs[0])
