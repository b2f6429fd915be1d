"""The origin of a copied node or value: the one of the model that it stands for, in metadata that onnx_ir copies."""

from __future__ import annotations

from typing import TypeVar

import onnx_ir as ir

_ORIGIN = "splitc.origin"

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
    """The model's node or value that a copy stands for; None for one that a pass has added."""
    origin: T | None = clone.meta.get(_ORIGIN)
    return origin


def described(clone: ir.Value) -> ir.Value:
    """The model's value that a copy stands for, which has the type and shape that copies go without; else the value."""
    return origin_of(clone) or clone


def restore_types(graph: ir.Graph) -> None:
    """Give what nodes make the types of the model, in place: values between engines need them."""
    for value in (value for node in graph for value in node.outputs):
        value.type = value.type or described(value).type


def stand_for(value: ir.Value, origin: ir.Value | None) -> None:
    """Make a value a copy of one of the model."""
    if origin is not None:
        value.meta[_ORIGIN] = origin


def hand_over(old: ir.Value, new: ir.Value, suffix: str) -> None:
    """Move an old value's name, type and origin to a new one. The old value's name gets a suffix."""
    new.name, new.type = old.name, old.type
    old.name = f"{old.name}/{suffix}"
    stand_for(new, old.meta.pop(_ORIGIN, None))


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Let all that reads an old value read a new one, which gets its name, type, shape and origin."""
    hand_over(old, new, "replaced")
    new.shape = old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
