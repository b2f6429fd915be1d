"""Slots for adapters (LoRA): two optional inputs A and B of a layer. The layer's input x A x B is added to its result.

Engines are built twice, with and without slots, so that unused slots cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.adapters.linear_layers import find_linear_layers
from splitc.compiler.graphs.matching import is_onnx, made_by, only_user, other_input, value_before
from splitc.compiler.graphs.optional import add_optional, optional_inputs, source_of
from splitc.compiler.graphs.origins import origin_of, put_behind, take_place
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.nodes import MICROSOFT, inputs_of
from splitc.compiler.normal_form.graph import Graph, complete
from splitc.runtime.adapters.loaded import padded_rank
from splitc.runtime.adapters.matching import Layer
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Slot, Tensor

_SLOT, _INSIDE = "splitc.slot", "splitc.slot.inside"
# The symbol of adapters' ranks.
RANK = "lora_rank"
# The rank that memory is planned for if a model has slots and no rank was asked for. A choice: most files have 4 to 32.
USUAL_RANK = 16
# The largest rank. A choice: it exceeds the sides of most matrices, so A and B would be larger than the matrix.
MOST_RANK = 1 << 16
# The attributes of a convolution's window. A's convolution has those of the layer; B's is 1 x 1 over A's result.
_PLACES = ("strides", "pads", "dilations", "auto_pad")
# Products of dynamically quantized inputs.
_INTEGER = ("MatMulInteger", "ConvInteger")
_TO_FLOAT = (MICROSOFT, "MatMulIntegerToFloat")


def planned_rank(asked: int | None) -> int:
    """The adapters' rank that memory is planned for: the padded rank of arrays for the rank that was asked for.

    Raises MisuseError if it is too large.
    """
    if asked is not None and asked > MOST_RANK:
        raise MisuseError(f"--lora-slots {asked}: the rank of adapters is at most {MOST_RANK:,}")
    return padded_rank(USUAL_RANK if asked is None else asked)


@dataclass(frozen=True)
class Grafted:
    """The slots of layers. `without`: why other layers have none, by their weights' names."""

    slots: tuple[Slot, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)


def graft_slots(graph: Graph, rank: int) -> tuple[Graph, Grafted]:
    """Add a slot to each linear layer that has a name, in place. Memory is planned for adapters of this rank."""
    slots: list[Slot] = []
    optional, without = list(graph.optional), dict[str, str]()
    for layer in find_linear_layers(graph):
        places = [place_of(node) for node in layer.nodes]
        reasons = [place for place in places if isinstance(place, str)]
        if layer.is_read_both_ways:
            reasons.append("its transpose is multiplied by too")
        if why := next(iter(reasons), "" if layer.layer.names else "it has no name"):
            without[layer.weight.name or ""] = why
            continue
        a, b = (
            add_optional(graph.graph, _zeros(f"splitc.slot{len(slots)}.{which}", shape, layer.dtype, rank), shape)
            for which, shape in zip("AB", _shapes(layer.layer), strict=True)
        )
        for place in places:
            if isinstance(place, Place):
                _graft(place, a, b)
        optional += [a, b]
        slots.append(_described(layer.layer, a, b))
    made = replace(graph, reads=complete(graph.model), optional=tuple(optional))
    return made, Grafted(tuple(slots), without)


def _zeros(name: str, shape: Sequence[Any], dtype: ir.DataType, rank: int) -> ir.TensorProtocol:
    """The default of a slot's A or B: zeros, of the rank that memory is planned for."""
    sizes = [size if isinstance(size, int) else rank for size in shape]
    return ir.Tensor(np.zeros(sizes, dtype.numpy()), dtype, name=name)


def _shapes(layer: Layer) -> tuple[list[Any], list[Any]]:
    """The shapes of A and B. Those of a convolution are as in PEFT."""
    if not layer.kernel:
        return [layer.inputs, RANK], [RANK, layer.outputs]
    return [RANK, layer.inputs, *layer.kernel], [layer.outputs, RANK, *(1 for _ in layer.kernel)]


def _graft(place: Place, a: ir.Value, b: ir.Value) -> None:
    """Add the product of a layer's input with A and B to its result. The sum replaces the result."""
    made, attributes = place.last.outputs[0], place.node.attributes
    name = made.name or ""
    operator = "Conv" if "Conv" in place.node.op_type else "MatMul"
    where = [attributes[key] for key in _PLACES if operator == "Conv" and key in attributes]
    down = ir.Node("", operator, [place.data, a], where, name=f"{name}/slot_down")
    up = ir.node(operator, [down.outputs[0], b], name=f"{name}/slot_up")
    total = ir.node("Add", [made, up.outputs[0]], name=f"{name}/slot_sum")
    total.meta[_SLOT] = 0
    down.meta[_INSIDE] = up.meta[_INSIDE] = True
    place.last.append([down, up, total])
    new = total.outputs[0]
    made.name, new.name, new.type, new.shape = f"{name}/slot_without", name, made.type, made.shape
    down.outputs[0].name, up.outputs[0].name = f"{name}/slot_down", f"{name}/slot_up"
    put_behind(total, made)


def _described(layer: Layer, a: ir.Value, b: ir.Value, factor: float = 1.0) -> Slot:
    a.meta[_INSIDE] = b.meta[_INSIDE] = True
    kind = str((a.dtype or ir.DataType.FLOAT).numpy())
    first, second = _shapes(layer)
    tensors = Tensor(a.name or "", kind, first), Tensor(b.name or "", kind, second)
    return Slot(list(layer.names), layer.inputs, layer.outputs, *tensors, factor, list(layer.kernel))


def find_slots(graph: Graph, rank: int) -> tuple[Slot, ...]:
    """The model's own slots: a product with two optional inputs, which is added to another value.

    Olive and others write them, with empty defaults. Their sums are marked, in place, and memory is planned for
    adapters of this rank.
    """
    slots = (_own_slot(node, rank) for node in graph.nodes if is_onnx(node, "MatMul"))
    return tuple(slot for slot in slots if slot is not None)


def _own_slot(down: ir.Node, rank: int) -> Slot | None:
    """The slot whose first product is this node; None if there is none."""
    up = only_user(down.outputs[0], "MatMul")
    if up is None or up.inputs[0] is not down.outputs[0]:
        return None
    a, b = down.inputs[1], up.inputs[1]
    first, second = source_of(a), source_of(b)
    if a is None or b is None or first is None or second is None or len(shape_of(a)) != 2 or len(shape_of(b)) != 2:
        return None
    if first.is_fixed(1) or second.is_fixed(0) or not (first.is_fixed(0) and second.is_fixed(1)):
        return None
    factor, made, inside = 1.0, up.outputs[0], [down, up]
    if (scaled := only_user(made, "Mul")) is not None:
        other = other_input(scaled, made)
        number = other.const_value if other is not None and other.is_initializer() else None
        if number is None or number.size != 1:
            return None
        factor, made = float(number.numpy().reshape(())), scaled.outputs[0]
        inside.append(scaled)
    total = only_user(made, "Add")
    if total is None or other_input(total, made) is None or not factor:
        return None
    total.meta[_SLOT] = 1 if total.inputs[0] is made else 0
    for node in inside:
        node.meta[_INSIDE] = True
    name = re.sub(r"[./_]?lora[._]?A.*$", "", a.name or "")
    (inputs, _), (_, outputs) = shape_of(a), shape_of(b)
    for value, shape in ((a, (inputs, RANK)), (b, (RANK, outputs))):
        value.const_value = _zeros(value.name or "", shape, value.dtype or ir.DataType.FLOAT, rank)
        value.shape = ir.Shape(value.const_value.shape.numpy())
    return _described(Layer((name,), inputs, outputs), a, b, factor)


def _kept(node: ir.Node) -> int | None:
    """The input of a slot's sum that remains without the slot; None for any other node."""
    origin = origin_of(node)
    number: int | None = node.meta.get(_SLOT, None if origin is None else origin.meta.get(_SLOT))
    return number


def is_inside_slot(node: ir.Node | None) -> bool:
    """Whether a node is one of a slot's products."""
    return node is not None and _INSIDE in node.meta


def is_slot_input(value: ir.Value) -> bool:
    """Whether a value is a slot's A or B."""
    return _INSIDE in value.meta


def is_slot_sum(node: ir.Node) -> bool:
    """Whether a node adds a slot's update to its layer's result."""
    return _SLOT in node.meta


def without_slots(graph: ir.Graph) -> ir.Graph | None:
    """A copy of a rank's graph without slots; None if it has no slots."""
    if all(_kept(node) is None for node in graph):
        return None
    plain = graph.clone()
    for node, number in [(node, number) for node in plain if (number := _kept(node)) is not None]:
        kept, total = node.inputs[number], node.outputs[0]
        assert kept is not None
        if kept.producer() is None or len(kept.uses()) > 1:
            same = ir.node("Identity", [kept], name=node.name)
            node.prepend(same)
            kept = same.outputs[0]
        take_place(kept, total)
        plain.remove(node, safe=True)
    remove_unused(plain)
    return plain


def need_slots(graph: ir.Graph, inputs: Collection[str]) -> None:
    """Make the slots' `inputs` in a rank's graph inputs without defaults, in place: all of them have to be fed.

    ONNX Runtime can't bind values in place of initializers, and plans memory by the initializers' sizes.
    """
    for value in optional_inputs(graph):
        source = source_of(value)
        if source is not None and source.input in inputs:
            del graph.initializers[value.name or ""]
            value.const_value = None


@dataclass(frozen=True)
class Place:
    """A node that multiplies by a layer's weight, with the layer's input `data`, and the producer `last` of its result.

    `data` is the node's own input and `last` the node itself, unless the input is quantized dynamically.
    """

    node: ir.Node
    data: ir.Value
    last: ir.Node


def place_of(node: ir.Node) -> Place | str:
    """The place of a node that multiplies by a weight, or the reason why it has none."""
    data = node.inputs[0]
    if data is None or node.attributes.get_int("transA", 0) == 1:
        return "its input is transposed (transA)"
    if (groups := node.attributes.get_int("group", 1)) != 1:
        return f"its convolution has {groups} groups"
    if "activation" in node.attributes:
        return "its activation is fused into it"
    if node.op_type.startswith("QLinear"):
        return "its output is quantized"
    if node.op_type not in _INTEGER and (node.domain, node.op_type) != _TO_FLOAT:
        return Place(node, data, node)
    quantize, source = made_by(data, "DynamicQuantizeLinear"), value_before(data, "DynamicQuantizeLinear")
    if quantize is None or source is None or data is not quantize.outputs[0]:
        return "its input is not quantized by a DynamicQuantizeLinear"
    last = node if node.op_type not in _INTEGER else _scaled(node, quantize.outputs[1])
    return (
        Place(node, source, last)
        if last is not None
        else "its integer result is not followed by a Cast and a product with both scales"
    )


def _scaled(node: ir.Node, scale: ir.Value) -> ir.Node | None:
    """The producer of the integer product times the input's `scale` and a constant; None if there is none.

    The integers are cast to floating point first. The two factors may be multiplied with each other before.
    """
    last = only_user(node.outputs[0], "Cast")
    factors: list[ir.Value] = []
    while last is not None and len(factors) < 2:
        made = last.outputs[0]
        last = only_user(made, "Mul")
        other = None if last is None else other_input(last, made)
        if other is None:
            return None
        factors += _leaves(other)
    constants = [value for value in factors if value.is_initializer()]
    return last if len(factors) == 2 and len(constants) == 1 and any(value is scale for value in factors) else None


def _leaves(value: ir.Value) -> list[ir.Value]:
    """The factors of a product of two values; for any other value, the value."""
    maker = made_by(value, "Mul")
    return [value] if maker is None else inputs_of(maker)
