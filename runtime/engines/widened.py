"""Runs models of bfloat16 on CPU devices in float32: ONNX Runtime's CPU provider has hardly any kernel for bfloat16.

Inputs, outputs and weights keep their type, with casts between. So do values that ranks exchange, since ranks on GPUs
have them in bfloat16. A table that is looked up stays bfloat16, so that ONNX Runtime reads it from its mapped file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

# ONNX's codes of the types.
NARROW, WIDE = 16, 1
# The domain of the operators that exchange values (collectives/native).
EXCHANGES = "splitc"
# The attributes that name the type of a result.
OF_TYPES = ("to", "dtype", "output_dtype")


def in_float32(content: bytes) -> bytes | None:
    """The content of an ONNX file, with float32 in place of bfloat16; None without bfloat16, or without onnx."""
    if find_spec("onnx") is None:
        return None
    import onnx

    model = onnx.load_from_string(content)
    narrow = {
        *(tensor.name for tensor in model.graph.initializer if tensor.data_type == NARROW),
        *(value.name for value in _values(model.graph) if value.type.tensor_type.elem_type == NARROW),
    }
    if not narrow and not any(_uses_narrow(node) for node in _all_nodes(model.graph.node)):
        return None
    for function in model.functions:
        _widen_attributes(function.node)
    _Widening(narrow).widen(model.graph)
    return model.SerializeToString()


class _Widening:
    """The names of a model's values: `narrow` are those of bfloat16 in its file."""

    def __init__(self, narrow: set[str]) -> None:
        self._narrow = narrow
        # By the names of narrow values in the file: those of the float32 values that nodes read and make instead.
        self._wide: dict[str, str] = {}

    def widen(self, graph: Any) -> None:
        """Compute a model's graph in float32, between casts of inputs, weights and outputs."""
        given = dict.fromkeys(tensor.name for tensor in graph.initializer) | dict.fromkeys(v.name for v in graph.input)
        borders = dict.fromkeys([name for name in (*given, *(v.name for v in graph.output)) if name in self._narrow])
        self._wide = {name: f"{name}/float32" for name in borders}
        tables = {tensor.name for tensor in graph.initializer if tensor.data_type == NARROW}
        nodes = [made for node in list(graph.node) for made in self._widened(node, tables)]
        read = set(_names_read(nodes))  # ONNX Runtime would fold an unread cast of a table, and so read it whole
        before = [_cast(name, wide, WIDE) for name, wide in self._wide.items() if name in given and wide in read]
        results = dict.fromkeys(value.name for value in graph.output)  # one may be listed twice
        after = [_cast(self._wide[n], n, NARROW) for n in results if n in self._wide and n not in given]
        _replace_all(graph.node, [*before, *nodes, *after])
        _replace_all(graph.value_info, [v for v in graph.value_info if v.name not in self._narrow])

    def _widened(self, node: Any, tables: set[str]) -> list[Any]:
        """A node in float32, with the casts that it needs. Lookups in `tables` and exchanges are in bfloat16."""
        reads, makes = list(node.input), list(node.output)
        self._rename(node)
        before, after = list[Any](), list[Any]()
        if node.domain == EXCHANGES:
            for place, name in enumerate(reads):
                if name in self._narrow:
                    node.input[place] = f"{makes[0]}/narrow{place}"
                    before.append(_cast(self._wide.get(name, name), node.input[place], NARROW))
            narrow = [place for place, name in enumerate(makes) if name in self._narrow]
        else:
            narrow = []
            if node.op_type == "Gather" and not node.domain and reads[0] in tables:
                node.input[0], narrow = reads[0], [0]
        for place in narrow:
            wide = node.output[place]
            node.output[place] = f"{wide}/narrow"
            after.append(_cast(node.output[place], wide, WIDE))
        return [*before, node, *after]

    def _rename(self, node: Any) -> None:
        """Use the names of float32 values in a node and its subgraphs, and its attributes for float32."""
        for names in (node.input, node.output):
            names[:] = [self._wide.get(name, name) for name in names]
        _widen_attributes([node])
        for graph in _subgraphs(node):
            for value in _values(graph):
                value.name = self._wide.get(value.name, value.name)
                if value.type.tensor_type.elem_type == NARROW:
                    value.type.tensor_type.elem_type = WIDE
            for tensor in graph.initializer:
                _widen_tensor(tensor)
            for inner in graph.node:
                self._rename(inner)


def _values(graph: Any) -> Iterator[Any]:
    for values in (graph.input, graph.output, graph.value_info):
        yield from values


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _all_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _all_nodes(graph.node)


def _names_read(nodes: Iterable[Any]) -> Iterator[str]:
    """The names that nodes and their subgraphs read, and those of the subgraphs' outputs."""
    for node in _all_nodes(nodes):
        yield from node.input
        for graph in _subgraphs(node):
            yield from (value.name for value in graph.output)


def _uses_narrow(node: Any) -> bool:
    return any(attribute.name in OF_TYPES and attribute.i == NARROW for attribute in node.attribute)


def _widen_attributes(nodes: Iterable[Any]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in OF_TYPES and attribute.i == NARROW:
                attribute.i = WIDE
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)


def _widen_tensor(tensor: Any) -> None:
    """Make a small tensor float32, in place."""
    from onnx import numpy_helper

    if tensor.data_type == NARROW:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name))


def _cast(source: str, result: str, to: int) -> Any:
    from onnx.helper import make_node

    return make_node("Cast", [source], [result], to=to)


def _replace_all(messages: Any, new: list[Any]) -> None:
    del messages[:]
    messages.extend(new)
