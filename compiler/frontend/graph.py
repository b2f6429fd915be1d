"""Open a model lazily, bring it into the one form that the other passes expect, and say what its nodes read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.compiler.frontend.binding import Fixed, bind_inputs
from splitc.compiler.frontend.loading import load_model
from splitc.compiler.frontend.optional import mark_optional, source_of
from splitc.compiler.frontend.origins import mark_origins
from splitc.compiler.model_errors import ModelError
from splitc.compiler.operators.operator import Operator
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.manifest import Source
from splitc.runtime.package_files import hash_file


@dataclass(frozen=True)
class Graph:
    """A model's main graph, normalized, with what each node reads.

    `reads` maps a node to the values of the main graph that it needs: its inputs and what its subgraphs capture.
    `annotated` are the shapes that the file itself gives for values between nodes, by name.
    The normal form: functions inlined, nodes in topological order and all of them needed, constants and the
    subgraphs' initializers are initializers of the main graph, no initializer is an input, and every output has a
    node of its own. An output that is an input has none: it is in `passed`, with its place among the outputs, and not
    in the graph. `fixed` are the inputs that are none any more, `optional` the weights that a run may replace.
    """

    path: Path
    model: ir.Model
    reads: Mapping[ir.Node, tuple[ir.Value, ...]]
    annotated: Mapping[str, ir.Shape]
    passed: tuple[tuple[int, ir.Value], ...]
    fixed: tuple[Fixed, ...] = ()
    optional: tuple[ir.Value, ...] = ()

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        return tuple(self.reads)

    @cached_property
    def outputs(self) -> tuple[ir.Value, ...]:
        """The model's outputs as its users see them, those that are inputs included."""
        values = list(self.graph.outputs)
        for place, value in self.passed:
            values.insert(place, value)
        return tuple(values)

    @cached_property
    def position(self) -> Mapping[ir.Node, int]:
        """The place of each node in the model's order."""
        return {node: index for index, node in enumerate(self.nodes)}

    @cached_property
    def source(self) -> Source:
        """The model's file by name and hash."""
        return Source(self.path.name, hash_file(self.path))

    @cached_property
    def constant(self) -> frozenset[ir.Node]:
        """The nodes that compute from weights alone, and the same in each run."""
        return self._computed_from_weights(lambda operator: operator.random)

    @cached_property
    def folded(self) -> frozenset[ir.Node]:
        """Those of them that engines compute once: weights that are packed stay so until a run needs them."""
        return self._computed_from_weights(lambda operator: operator.random or operator.unpacks)

    def _computed_from_weights(self, excluded: Callable[[Operator], bool]) -> frozenset[ir.Node]:
        found: set[ir.Node] = set()
        for node in self.nodes:
            reads = self.reads[node]
            if not excluded(operator_of(node)) and all(v.is_initializer() or v.producer() in found for v in reads):
                found.add(node)
        return frozenset(found)

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value is a weight, or computed from weights alone."""
        return value.is_initializer() or value.producer() in self.constant

    def weights(self, node: ir.Node) -> list[ir.Value]:
        """The initializers that a node reads."""
        return [value for value in self.reads[node] if value.is_initializer()]


def open_graph(path: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Graph:
    """Open and check a model. Weights stay on disk. The inputs in `settings` become constants of these values.

    Raises ModelError for a model that `load_model` refuses, MisuseError for settings that the model does not take.
    """
    model = load_model(path)
    optional = mark_optional(model)
    fixed, passed = _normalize(model, settings)
    values = (value for node in model.graph for value in node.outputs)
    annotated = {value.name: value.shape for value in values if value.name and value.shape is not None}
    reads = {node: tuple(node_reads(node)) for node in model.graph}
    optional = tuple(value for value in optional if source_of(value) is not None)
    mark_origins(model.graph)
    return Graph(path, model, reads, annotated, passed, fixed, optional)


def _normalize(
    model: ir.Model, settings: Mapping[str, Any]
) -> tuple[tuple[Fixed, ...], tuple[tuple[int, ir.Value], ...]]:
    """Bring the model into normal form, in place. Returns inputs, and outputs that are inputs, which are taken off."""
    passes.InlinePass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    fixed = tuple(bind_inputs(model, settings)) if settings else ()
    # Before the outputs are fixed: that would give such an input another name.
    passed = tuple((place, value) for place, value in enumerate(model.graph.outputs) if value.is_graph_input())
    for place, _ in reversed(passed):
        del model.graph.outputs[place]
    if not model.graph.outputs:
        raise ModelError("the model computes nothing: all its outputs are inputs")
    passes.RemoveUnusedNodesPass()(model)
    passes.OutputFixPass()(model)
    _name_initializer_outputs(model.graph)
    if not _is_sorted(model.graph):
        passes.TopologicalSortPass()(model)
    return fixed, passed


def _name_initializer_outputs(graph: ir.Graph) -> None:
    """Put an Identity between an output and the initializer that it is, so that some node produces each output."""
    for index, value in enumerate(graph.outputs):
        if value.producer() is None:
            node = ir.node("Identity", [value])
            graph.append(node)
            output = node.outputs[0]
            name, value.name = value.name, f"{value.name}_initializer"
            output.name, output.type, output.shape = name, value.type, value.shape
            graph.outputs[index] = output


def _is_sorted(graph: ir.Graph) -> bool:
    seen: set[ir.Node] = set()
    for node in graph:
        if any((producer := value.producer()) is not None and producer not in seen for value in node_reads(node)):
            return False
        seen.add(node)
    return True


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs that are a node's attributes: the branches of an If, the body of a Loop or Scan."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def node_reads(node: ir.Node) -> Iterator[ir.Value]:
    """The values of a node's own graph that it and its subgraphs read, each once."""
    inner = (n for graph in subgraphs(node) for n in ir.traversal.RecursiveGraphIterator(graph))
    named = (value for graph in subgraphs(node) for value in graph.outputs)
    read = itertools.chain(node.inputs, *(n.inputs for n in inner), named)
    return iter(dict.fromkeys(value for value in read if value is not None and value.graph is node.graph))
