"""Leads from nodes and values of a copied graph back to the model's: its origins, in metadata that onnx_ir copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import onnx_ir as ir

from splitc.compiler.request.shapes import Shape

_ORIGIN, _SIZES = "splitc.origin", "splitc.sizes"

T = TypeVar("T", ir.Node, ir.Value)


def mark_origins(graph: ir.Graph) -> None:
    """Mark the graph's inputs, nodes and their outputs as their own origins, in place."""
    for value in graph.inputs:
        value.meta[_ORIGIN] = value
    for node in graph:
        node.meta[_ORIGIN] = node
        for value in node.outputs:
            value.meta[_ORIGIN] = value


def origin_of(clone: T) -> T | None:
    """The model's node or value of a copy; None for nodes and values that a pass has added."""
    origin: T | None = clone.meta.get(_ORIGIN)
    return origin


def described(clone: ir.Value) -> ir.Value:
    """The model's value that a value is a copy of, which has a type and a shape; the value itself if it is no copy."""
    return origin_of(clone) or clone


def planned_shape(clone: ir.Value, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a copy in the model: `shapes` has these by name. () if it is not known."""
    return shapes.get(described(clone).name or "", ())


def note_sizes(value: ir.Value, shape: ir.Shape | None) -> None:
    """Note a value's sizes on its rank. Its `shape`, which is written to the engine's file, may omit some of them."""
    value.meta[_SIZES] = shape


def noted_sizes(value: ir.Value) -> ir.Shape | None:
    """The noted sizes of a value; None if there are none."""
    shape: ir.Shape | None = value.meta.get(_SIZES)
    return shape


def own_shape(value: ir.Value) -> ir.Shape | None:
    """The shape of a value on its rank: its noted sizes, or else the model's."""
    noted = noted_sizes(value)
    return described(value).shape if noted is None else noted


def restore_types(graph: ir.Graph) -> None:
    """Set the model's types on the outputs of all nodes, in place: values between engines need them."""
    for value in (value for node in graph for value in node.outputs):
        value.type = value.type or described(value).type


def stand_for(value: ir.Value, origin: ir.Value | None) -> None:
    """Mark a value as a copy of a value of the model."""
    if origin is not None:
        value.meta[_ORIGIN] = origin


def hand_over(old: ir.Value, new: ir.Value, suffix: str) -> None:
    """Move an old value's name, type, sizes and origin to a new one. A suffix is appended to the old value's name."""
    new.name, new.type = old.name, old.type
    note_sizes(new, noted_sizes(old))
    old.name = f"{old.name}/{suffix}"
    stand_for(new, old.meta.pop(_ORIGIN, None))


def put_behind(node: ir.Node, value: ir.Value) -> None:
    """Replace a value by the result of a node that reads it, for all other readers, and as an output of the graph."""
    own = [number for number, read in enumerate(node.inputs) if read is value]
    value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    for number in own:
        node.replace_input_with(number, value)


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Replace an old value by a new one for all readers. The new one gets its name, type, shape and origin."""
    hand_over(old, new, "replaced")
    new.shape = old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
