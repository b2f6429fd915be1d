"""A package as one graph: the engines of all ranks, joined by the values that cross between them.

So a part of a package can run, with all ranks that compute it and without any other part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx.helper import make_node

from splitc.compiler.engine_graphs.skip_norms import decompose
from splitc.compiler.lowering.communication import ALL_REDUCE, DOMAIN, HALF, RECEIVE, SEND
from splitc.compiler.reading.external_data import with_full_path
from splitc.compiler.reading.protos import graphs_inside
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.steps import Receive, Reduce, Run

# The operator of a reduction whose parts are all in one graph.
_REDUCTIONS = {"sum": "Add", "max": "Max", 0: "Add", 1: "Max"}


@dataclass(frozen=True)
class JoinedGraph:
    """The nodes of all ranks by their outputs, and the weights.

    A value of a rank is named `rank/name`, a value inside an engine `rank.engine/name`. `inside` are the names inside
    engines for each value of a rank.
    """

    nodes: Mapping[str, onnx.NodeProto]
    weights: Mapping[str, ir.TensorProtocol]
    inside: Mapping[str, list[str]]
    opsets: Mapping[str, int]

    def names(self, rank: int, name: str) -> list[str]:
        """The names of a rank's value in the graph; none if the rank has no such value."""
        whole = f"{rank}/{name}"
        return [inner for inner in (whole, *self.inside.get(whole, ())) if inner in self.nodes]

    def needed(self, outputs: Iterable[str], fed: Collection[str]) -> tuple[list[onnx.NodeProto], set[str]]:
        """The nodes that compute these values from the `fed` ones, and the values that they read but none computes."""
        needed: dict[int, onnx.NodeProto] = {}
        missing: set[str] = set()
        stack = list(outputs)
        while stack:
            name = stack.pop()
            node = self.nodes.get(name)
            if name in fed or name in self.weights or node is None:
                missing.add(name)
            elif id(node) not in needed:
                needed[id(node)] = node
                local = set(_made_inside(node))
                stack += [read for read in reads_of(node) if read and read not in local]
        return list(needed.values()), missing


@dataclass
class _Joiner:
    """A joined graph under construction."""

    package: Path
    manifest: Manifest
    nodes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    weights: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    inside: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    opsets: dict[str, int] = field(default_factory=dict)
    # Exchanges inside engines, in each rank's order: all-reduces by rank, sends and receives by (sender, receiver).
    sums: dict[int, list[tuple[onnx.NodeProto, list[int]]]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    received: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, node: onnx.NodeProto) -> None:
        self.nodes.update(dict.fromkeys([name for name in node.output if name], node))

    def join(self, kind: str, inputs: Iterable[str], output: str) -> None:
        self.add(make_node(kind, list(inputs), [output], name=output))

    def reduce(self, kind: str, parts: Sequence[str], output: str) -> None:
        """Reduce values by operators of two inputs: ONNX Runtime has no Sum for integers."""
        total, *others = parts
        for number, part in enumerate(others, 1):
            target = output if number == len(others) else f"{output}/{number}"
            self.join(kind, [total, part], target)
            total = target

    def add_rank(self, rank: int) -> None:
        for step in self.manifest.ranks[rank].program:
            if isinstance(step, Run):
                self.add_engine(rank, step.engine)
            elif isinstance(step, Receive):
                self.join("Identity", [f"{step.source}/{step.value}"], f"{rank}/{step.value}")
            elif isinstance(step, Reduce):
                for part, whole in zip(step.parts, step.wholes, strict=True):
                    parts = [f"{other}/{part}" for other in step.ranks]
                    self.reduce(_REDUCTIONS[step.operation], parts, f"{rank}/{whole}")

    def add_engine(self, rank: int, number: int) -> None:
        engine = self.manifest.ranks[rank].engines[number]
        path = self.package / (engine.source or engine.path)
        model = onnx.load(path, load_external_data=False)
        self.opsets.update({opset.domain: opset.version for opset in model.opset_import if opset.domain != DOMAIN})
        prefix = f"{rank}.{number}/"
        initializers = {tensor.name for tensor in model.graph.initializer}
        for proto in model.graph.initializer:
            tensor = ir.serde.deserialize_tensor(proto)
            if isinstance(tensor, ir.ExternalTensor):
                tensor = with_full_path(tensor, (path.parent / tensor.location).resolve())
            self.weights[prefix + proto.name] = tensor
        for value in (value for value in model.graph.input if value.name not in initializers):
            self.join("Identity", [f"{rank}/{value.name}"], prefix + value.name)
        for node in model.graph.node:
            for name in node.output:
                self.inside[f"{rank}/{name}"].append(prefix + name)
            _rename(node, lambda name: prefix + name)
            if node.domain == DOMAIN:
                self.add_exchange(rank, node, engine.group)
            else:
                for part in decompose(node):
                    self.add(part)
        for value in model.graph.output:
            if f"{rank}/{value.name}" not in self.nodes:
                self.join("Identity", [prefix + value.name], f"{rank}/{value.name}")

    def add_exchange(self, rank: int, node: onnx.NodeProto, group: list[int]) -> None:
        kind = node.op_type.removesuffix(HALF)
        peer = next((attribute.i for attribute in node.attribute if attribute.name == "peer"), 0)
        if kind == ALL_REDUCE:
            self.sums[rank].append((node, group))
        elif kind == SEND:
            self.sent[rank, peer].append(node.input[0])
            self.join("Identity", [node.input[0]], node.output[0])
        elif kind == RECEIVE:
            self.received[peer, rank].append(node.output[0])

    def connect(self) -> None:
        """Connect exchanges inside engines. All ranks run them in one order, so the n-th ones belong together."""
        for own in self.sums.values():
            for place, (node, group) in enumerate(own):
                operation = next((attribute.i for attribute in node.attribute if attribute.name == "operation"), 0)
                parts = [self.sums[other][place][0].input[0] for other in group]
                self.reduce(_REDUCTIONS[operation], parts, node.output[0])
        for ends, names in self.received.items():
            for source, target in zip(self.sent[ends], names, strict=True):
                self.join("Identity", [source], target)


def join_ranks(package: Path, manifest: Manifest) -> JoinedGraph:
    """The package's engines as one graph. They are ONNX files; their weights stay on disk."""
    joiner = _Joiner(package, manifest)
    for rank in range(len(manifest.ranks)):
        joiner.add_rank(rank)
    joiner.connect()
    return JoinedGraph(joiner.nodes, joiner.weights, dict(joiner.inside), joiner.opsets)


def _rename(node: onnx.NodeProto, rename: Callable[[str], str]) -> None:
    """Rename all values that a node and the graphs inside it read and compute."""
    graphs = list(graphs_inside([node]))
    for own in (node, *chain.from_iterable(graph.node for graph in graphs)):
        own.name = rename(own.name) if own.name else ""
        own.input[:] = [rename(name) if name else "" for name in own.input]
        own.output[:] = [rename(name) if name else "" for name in own.output]
    for graph in graphs:
        for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            value.name = rename(value.name)  # type: ignore[attr-defined]  # each of these has a name


def reads_of(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node and the graphs inside it read."""
    yield from node.input
    for graph in graphs_inside([node]):
        yield from (value.name for value in graph.output)
        yield from chain.from_iterable(inner.input for inner in graph.node)


def _made_inside(node: onnx.NodeProto) -> Iterator[str]:
    for graph in graphs_inside([node]):
        yield from (value.name for value in (*graph.input, *graph.initializer))  # type: ignore[attr-defined]
        yield from chain.from_iterable(inner.output for inner in graph.node)
