"""A model's graph in the normal form that all passes expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import onnx_ir as ir

from splitc.compiler.graphs.optional import mark_optional, source_of
from splitc.compiler.graphs.origins import mark_origins
from splitc.compiler.graphs.reads import is_random, node_reads
from splitc.compiler.graphs.walks import computed_from_weights, producers
from splitc.compiler.inference.shapes import sizes_of
from splitc.compiler.inference.symbolic import count_axes
from splitc.compiler.normal_form.binding import Fixed, bind_inputs
from splitc.compiler.normal_form.normalize import COMPLETE, lift, take_off_passed
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.reading.external_data import settle_weights
from splitc.compiler.reading.loading import invalid_model_explained
from splitc.compiler.reading.protos import lift_constants
from splitc.runtime.package.files import hash_file
from splitc.runtime.package.manifest import Source


@dataclass(frozen=True)
class Graph:
    """A model's main graph in normal form, with what each node reads.

    The normal form: functions are inlined, nodes are in topological order, unused ones are removed, constants and the
    subgraphs' initializers are initializers of the main graph, no initializer is an input, and each output has a
    producer.

    - `reads`: maps a node to the values of the main graph that it needs: its inputs and those that its subgraphs
      capture.
    - `declared`: the shapes of intermediate values in the file, by name.
    - `passed`: model outputs that are inputs, with their index among the outputs. The graph does not have them.
    - `fixed`: the inputs that were bound to a constant, or removed since nothing reads them.
    - `optional`: the weights that a request may override.
    - `data_files`: the files of the model's external data. With `trusts_data` they may lie outside its folder.
    """

    path: Path
    model: ir.Model
    reads: Mapping[ir.Node, tuple[ir.Value, ...]]
    declared: Mapping[str, ir.Shape]
    passed: tuple[tuple[int, ir.Value], ...]
    fixed: tuple[Fixed, ...] = ()
    optional: tuple[ir.Value, ...] = ()
    data_files: frozenset[Path] = frozenset()
    trusts_data: bool = False

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        return tuple(self.reads)

    @cached_property
    def outputs(self) -> tuple[ir.Value, ...]:
        """The model's outputs in its file's order, including those that are inputs."""
        values = list(self.graph.outputs)
        for place, value in self.passed:
            values.insert(place, value)
        return tuple(values)

    def are_alike(self, one: ir.Value, other: ir.Value) -> bool:
        """Whether the file declares the same shape for two values, in numbers and symbols."""
        sizes = self._written_sizes(one)
        return sizes is not None and sizes == self._written_sizes(other)

    def _written_sizes(self, value: ir.Value) -> list[int | str] | None:
        """A value's sizes as the file declares them, or as inferred if all are numbers; None if one is not known."""
        shape = self.declared.get(value.name or "", value.shape)
        if shape is None:
            return None
        is_written = value.is_graph_input() or (value.name or "") in self.declared
        known = [size for size in sizes_of(shape) if isinstance(size, int) or (is_written and size is not None)]
        return known if len(known) == len(shape) else None

    @cached_property
    def position(self) -> Mapping[ir.Node, int]:
        """The index of each node in the model's order."""
        return {node: index for index, node in enumerate(self.nodes)}

    @cached_property
    def axis_counts(self) -> Mapping[ir.Value, int]:
        """The number of axes of each value, if known."""
        return count_axes(self.model)

    @cached_property
    def source(self) -> Source:
        """The name and hash of the model's file."""
        return Source(self.path.name, hash_file(self.path))

    @cached_property
    def constant(self) -> frozenset[ir.Node]:
        """The nodes that compute from weights alone, with the same result in each run."""
        return computed_from_weights(self.reads, is_random)

    @cached_property
    def folded(self) -> frozenset[ir.Node]:
        """The constant nodes that engines fold. Dequantization is not folded: quantized weights stay packed."""
        return computed_from_weights(self.reads, lambda node: is_random(node) or operator_of(node).dequantizes)

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value is a weight, or computed from weights alone."""
        return value.is_initializer() or value.producer() in self.constant

    @cached_property
    def uses(self) -> Mapping[ir.Value, tuple[ir.Node, ...]]:
        """For each weight, the nodes that read it or a value computed from it by constant nodes, and these nodes."""
        behind: dict[ir.Node, dict[ir.Value, None]] = {}  # the weights that each constant node computes from
        uses: dict[ir.Value, list[ir.Node]] = {}
        for node, reads in self.reads.items():
            weights = dict.fromkeys(self.weights(node))
            for maker in producers(reads):
                weights.update(behind.get(maker, {}))
            for weight in weights:
                uses.setdefault(weight, []).append(node)
            if node in self.constant:
                behind[node] = weights
        return {weight: tuple(nodes) for weight, nodes in uses.items()}

    def weights(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """The initializers that a node reads."""
        return self._weights[node]

    @cached_property
    def _weights(self) -> Mapping[ir.Node, tuple[ir.Value, ...]]:
        return {node: tuple(v for v in reads if v.is_initializer()) for node, reads in self.reads.items()}


def complete(model: ir.Model) -> dict[ir.Node, tuple[ir.Value, ...]]:
    """Restore the normal form of a graph that was rewritten, in place. Returns what each node reads.

    The graph's nodes and values become their own origins.
    """
    COMPLETE(model)
    mark_origins(model.graph)
    return {node: tuple(node_reads(node)) for node in model.graph}


def open_graph(
    path: Path,
    proto: onnx.ModelProto,
    data_files: frozenset[Path],
    settings: Mapping[str, Any] = MappingProxyType({}),
    trusts_data: bool = False,
) -> Graph:
    """The graph of a model that `read_model` read from `path`. Weights stay on disk.

    The inputs in `settings` become constants. With `trusts_data`, the model's external data may lie outside its folder.
    Raises ModelError for an invalid model, MisuseError for settings that do not fit the model.
    """
    with invalid_model_explained(path):
        lift_constants(proto.graph)
        model = ir.from_proto(proto)
        settle_weights(model, path.parent)
        optional = mark_optional(model)
        lift(model)
        fixed = tuple(bind_inputs(model, settings)) if settings else ()
        passed = take_off_passed(model.graph)
        reads = complete(model)
    values = (value for node in model.graph for value in node.outputs)
    declared = {value.name: value.shape for value in values if value.name and value.shape is not None}
    optional = tuple(value for value in optional if source_of(value) is not None)
    return Graph(path, model, reads, declared, passed, fixed, optional, data_files, trusts_data)
