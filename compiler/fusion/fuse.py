"""Fuse what exporters wrote out, for engines that do not do it themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.normal_form import COMPLETE
from splitc.compiler.frontend.origins import mark_origins
from splitc.compiler.frontend.probe_sizes import bind_probe_sizes
from splitc.compiler.frontend.reads import node_reads
from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.fusion.attention import NotFusedError, find_attention
from splitc.compiler.fusion.kernels import FASTER, LEAST_SCORES
from splitc.compiler.fusion.multi_head import DOMAIN, OPERATOR, write_multi_head_attention
from splitc.compiler.fusion.sizes import Sizes, read_sizes
from splitc.compiler.request.shapes import Shape


@dataclass(frozen=True)
class Fate:
    """What became of a Softmax that weighs values: the operator that has it inside, or why there is none."""

    softmax: str
    operator: str | None
    why: str | None = None


@dataclass(frozen=True)
class Fused:
    """A graph whose attention is one operator each where that can be, with the shapes of all its values."""

    graph: Graph
    bound: BoundShapes
    fates: tuple[Fate, ...]


def fuse(
    graph: Graph,
    shapes: Mapping[str, Shape],
    bound: BoundShapes,
    types: Collection[ir.DataType] = FASTER,
    least: int = LEAST_SCORES,
) -> Fused:
    """Fuse the graph's attention in numbers of these types, and with at least so many scores a head, in place.

    `bound` are the shapes of its values with the inputs' `shapes`.
    """
    softmaxes = [node for node in graph.nodes if node.op_type == "Softmax" and not node.domain]
    if not softmaxes:
        return Fused(graph, bound, ())
    sizes = read_sizes(bound, bind_probe_sizes(graph, shapes, bound))
    editor, opset = Editor(graph.graph), graph.model.opset_imports.get("", 1)
    fates = [fate for node in softmaxes if (fate := _fuse(node, editor, sizes, opset, types, least)) is not None]
    if not any(fate.operator for fate in fates):
        return Fused(graph, bound, tuple(fates))
    graph.model.opset_imports.setdefault(DOMAIN, 1)
    COMPLETE(graph.model)
    mark_origins(graph.graph)
    reads = {node: tuple(node_reads(node)) for node in graph.graph}
    return Fused(replace(graph, reads=reads), replace(bound, shapes=sizes.shapes), tuple(fates))


def _fuse(
    node: ir.Node, editor: Editor, sizes: Sizes, opset: int, types: Collection[ir.DataType], least: int
) -> Fate | None:
    name = node.name or node.outputs[0].name or ""
    try:
        attention = find_attention(node, sizes.rank, opset)
        if attention is None:
            return None
        if (dtype := attention.query.dtype) not in types:
            raise NotFusedError(f"no kernel is faster for its type, {'unknown' if dtype is None else dtype.name}")
        scores = sizes.of(node.outputs[0])
        if scores is None or scores[-2][0] * scores[-1][0] < least:
            raise NotFusedError("it is too small to be faster as one operator")
        write_multi_head_attention(attention, editor, sizes)
    except NotFusedError as error:
        return Fate(name, None, str(error))
    return Fate(name, OPERATOR)
