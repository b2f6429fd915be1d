"""The costs of a graph's nodes with bound shapes: floating point operations, bytes of weights and of values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.caches.lengths import BRANCH_NODES, SEVERAL_ROWS
from splitc.compiler.graphs.reads import subgraphs
from splitc.compiler.inference.shapes import BoundShapes, bind_shapes, shape_of, tensor_bytes
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.operators.operator import Shapes
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.operators.scratch import INT8_ACCURACY
from splitc.compiler.request.shapes import Shape
from splitc.runtime.hardware.profiles import PROFILES


@dataclass(frozen=True)
class Speed:
    """A device's floating point operations per second, and bytes per second to and from its memory.

    - `cached`, `cache`: computed values of at most `cache` bytes are read from its cache, at `cached` bytes per second.
    - `exposed`: computing and moving bytes overlap; this share of the shorter one is added to the longer one.
    - `attention`: the share of `flops` that fused attention reaches.
    - `is_gpu`: it is a GPU, whose kernels read and write some values several times (`Operator.gpu_passes`).
    """

    flops: float
    bytes: float
    cached: float = 0.0
    cache: int = 0
    exposed: float = 0.0
    attention: float = 1.0
    is_gpu: bool = False


def nominal_speed(kind: str) -> Speed:
    """The speed of one CPU core or of a GPU, from its device profile.

    It is right to an order of magnitude, enough to compare stages. `--profile` measures the model instead.
    """
    profile = PROFILES[kind]
    is_gpu = kind == "cuda"
    return Speed(profile.flops, profile.bytes, exposed=profile.exposed, attention=profile.attention, is_gpu=is_gpu)


# The bytes of a file that Linux maps around a byte that is read (`fault_around_bytes`).
MAPPED_AROUND = 64 << 10


@dataclass(frozen=True, eq=False)
class Costs:
    """The sizes of values, and the costs of nodes, of a graph with bound input shapes.

    With `maps_weights`, as on CPUs, engines read embedding tables from their mapped files.
    """

    graph: Graph
    bound: BoundShapes
    maps_weights: bool = False

    @cached_property
    def certain(self) -> BoundShapes:
        """The shapes that are the same whether or not a request overrides optional inputs."""
        if not self.graph.optional:
            return self.bound
        inputs = {value.name or "": self.shapes[value.name or ""] for value in self.graph.graph.inputs}
        return bind_shapes(self.graph.model, inputs)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The bound shapes of values by name."""
        return self.bound.shapes

    def value_bytes(self, value: ir.Value) -> int:
        """The bytes of a value: by its bound shape, or those of a weight's stored tensor.

        A value that engines fold counts 0: see `held`.
        """
        size = self._bytes.get(value)
        if size is None:
            tensor = value.const_value
            folded = value.producer() in self.graph.folded
            size = tensor.nbytes if tensor else 0 if folded else tensor_bytes(value, self.shapes.get(value.name or ""))
            self._bytes[value] = size
        return size

    @cached_property
    def _bytes(self) -> dict[ir.Value, int]:
        return {}

    def weight_bytes(self, nodes: Iterable[ir.Node]) -> int:
        """Bytes of the weights that the nodes read, each counted once."""
        return sum(map(self.value_bytes, self.weights(nodes)))

    def weights(self, nodes: Iterable[ir.Node]) -> list[ir.Value]:
        """The weights that the nodes read, each once."""
        return list(dict.fromkeys(weight for node in nodes for weight in self.graph.weights(node)))

    def held(self, nodes: Iterable[ir.Node]) -> dict[ir.Value, int]:
        """The bytes of each constant that an engine of the nodes holds: weights, or values folded from them."""
        running = [node for node in nodes if node not in self.graph.folded]
        read = dict.fromkeys(value for node in running for value in self._constants[node])
        return {value: self.constant_bytes(value) for value in read}

    def folding(self, nodes: Iterable[ir.Node]) -> int:
        """The peak bytes of an engine of the nodes while it folds constants.

        All values folded so far are held, including intermediate ones, and the weights that a node reads from its
        file. Intermediate values are freed when everything is folded.
        """
        kept = most = 0
        for node in nodes:
            if node in self.graph.folded:
                made = sum(map(self.constant_bytes, node.outputs))
                read = sum(map(self.constant_bytes, self.graph.weights(node)))
                most, kept = max(most, kept + made + read), kept + made
        return most

    @cached_property
    def in_files(self) -> Mapping[ir.Value, int]:
        """By embedding table, the bytes that stay in the mapped file: all but the pages around a request's rows."""
        if not self.maps_weights:
            return {}
        running = [node for node in self.graph.nodes if node not in self.graph.folded]
        readers = Counter(value for node in running for value in self._constants[node])
        lookups: dict[ir.Value, list[int]] = {}
        for node in running:
            for indices, table in operator_of(node).lookups:
                value = node.inputs[table]
                if value is not None and value.is_initializer() and value.dtype != ir.DataType.STRING:
                    lookups.setdefault(value, []).append(math.prod(shape_of(node.inputs[indices], self.shapes)))
        return {
            value: max(0, self.constant_bytes(value) - sum(rows) * MAPPED_AROUND)
            for value, rows in lookups.items()
            if len(rows) == readers[value]
        }

    def weight_in_memory(self, weight: ir.Value, size: int) -> int:
        """The bytes of a weight, or a shard, of `size` bytes in an engine: on CPUs, half precision is cast to float32.

        CPU kernels compute in float32. Embedding tables are not cast.
        """
        is_single = self.maps_weights and weight.dtype in HALVES and weight not in self.in_files
        return 2 * size if is_single else size

    def value_in_memory(self, value: ir.Value, size: int, is_given: bool) -> int:
        """The bytes of a computed value, or a shard, of `size` bytes in an engine: on CPUs, half precision is float32.

        Casts between two float32 kernels are removed (core/optimizer/insert_cast_transformer.cc). An output
        (`is_given`) is cast at the end, and exists in both types.
        """
        if not self.maps_weights or value.dtype not in HALVES:
            return size
        return (3 if is_given else 2) * size

    def left_in_file(self, weight: ir.Value, size: int) -> int:
        """Of an embedding table, or a shard of its rows, of `size` bytes: those that stay in the mapped file."""
        return self.in_files[weight] * size // max(1, self.constant_bytes(weight)) if weight in self.in_files else 0

    def packed_scales(self, nodes: Iterable[ir.Node]) -> frozenset[ir.Value]:
        """Scales of quantized weights that the nodes' kernels on CPUs pack; see `Operator.packed_scales`."""
        scales = {
            node.inputs[place]
            for node in nodes
            if self.maps_weights and (place := operator_of(node).packed_scales) is not None
            if node.attributes.get_int("accuracy_level", 0) == INT8_ACCURACY and place < len(node.inputs)
        }
        return frozenset(value for value in scales if value is not None)

    def constant_bytes(self, value: ir.Value) -> int:
        """Bytes of a constant, including constants that engines fold."""
        is_stored = value.const_value is not None
        return self.value_bytes(value) if is_stored else tensor_bytes(value, self.shapes.get(value.name or ""))

    @cached_property
    def _constants(self) -> Mapping[ir.Node, tuple[ir.Value, ...]]:
        """The constants that each node reads when it runs."""
        folded = self.graph.folded
        return {
            node: tuple(value for value in reads if value.is_initializer() or value.producer() in folded)
            for node, reads in self.graph.reads.items()
        }

    def count_run(self, nodes: Iterable[ir.Node]) -> int:
        """The number of nodes that an engine on a CPU runs for these, including those of their subgraphs."""
        running = [node for node in nodes if node not in self.graph.folded]
        branches = sum(BRANCH_NODES for node in running if SEVERAL_ROWS in node.metadata_props)
        return branches + sum(operator_of(node).nodes + sum(map(self.count_run, subgraphs(node))) for node in running)

    def flops(self, node: ir.Node) -> int:
        """Floating point operations of a node; see `node_flops`."""
        return self._flops[node]

    def scratch(self, node: ir.Node) -> tuple[int, ...]:
        """Bytes of the blocks that the kernel of a node allocates while it runs; see `Operator.scratch`."""
        return self._scratch.get(node, ())

    def is_product(self, node: ir.Node) -> bool:
        """Whether a node takes more than two operations for each output element, as products and convolutions do."""
        return node in self._products

    @cached_property
    def _products(self) -> frozenset[ir.Node]:
        def elements(node: ir.Node) -> int:
            return sum(math.prod(self.shapes.get(value.name or "", ())) for value in node.outputs)

        return frozenset(node for node, flops in self._flops.items() if flops > 2 * elements(node))

    def seconds(self, node: ir.Node, speed: Speed) -> float:
        """The estimated seconds of a node by the roofline model (Williams et al., 2009).

        The time is the longer of computing and moving bytes, plus the exposed share of the shorter one. A lookup reads
        only as many bytes of its table as it writes.
        """
        operator, (stored, computed) = operator_of(node), self._moved[node]
        near = sum([size for size in computed if size <= speed.cache])
        far = stored + sum(computed) - near
        moving = far / speed.bytes + (near / speed.cached if near else 0.0)
        share = speed.attention if operator.is_attention else 1.0
        computing = self._flops[node] / (share * speed.flops)
        moving *= operator.gpu_passes if speed.is_gpu else 1.0
        adding = self._bias_bytes(node) / speed.bytes if speed.is_gpu else 0.0
        return max(computing, moving) + speed.exposed * min(computing, moving) + adding

    def steps(self, node: ir.Node) -> int:
        """The steps that a node takes one after another; 0 if it is no recurrent network."""
        steps = operator_of(node).steps
        return 0 if steps is None else steps(self.shapes_of(node)[0])

    def _bias_bytes(self, node: ir.Node) -> int:
        """The bytes that are read and written to add a bias in a kernel of its own; 0 if that is not done."""
        place = operator_of(node).gpu_bias
        has_bias = place is not None and len(node.inputs) > place and node.inputs[place] is not None
        return 2 * self.value_bytes(node.outputs[0]) if has_bias else 0

    @cached_property
    def _flops(self) -> dict[ir.Node, int]:
        return {node: node_flops(node, self.shapes) for node in self.graph.nodes}

    @cached_property
    def _scratch(self) -> Mapping[ir.Node, tuple[int, ...]]:
        running = [node for node in self.graph.nodes if node not in self.graph.folded]
        return {node: self.scratch_of(node, *self.shapes_of(node)) for node in running}

    def shapes_of(self, node: ir.Node) -> tuple[Shapes, Shapes]:
        """The shapes of a node's inputs and outputs."""
        inputs, outputs = ([shape_of(value, self.shapes) for value in values] for values in (node.inputs, node.outputs))
        return inputs, outputs

    def scratch_of(self, node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
        """As `scratch`, if inputs and outputs have these shapes."""
        operator, scratch = operator_of(node), None
        if not self.maps_weights:
            scratch = operator.half_scratch if node.outputs[0].dtype in HALVES else operator.single_scratch
        scratch = scratch or operator.scratch
        blocks = () if scratch is None else scratch(node, inputs, outputs)
        return tuple([elements * self._item_bytes(node) for elements in blocks if elements])

    def padding_of(self, node: ir.Node, inputs: Shapes, outputs: Shapes) -> int | None:
        """Bytes that the kernel of a node adds to its weight; see `Operator.padding`."""
        padding = operator_of(node).padding if self.maps_weights else None
        elements = 0 if padding is None else padding(node, inputs, outputs)
        return elements * self._item_bytes(node) if elements else elements

    def _item_bytes(self, node: ir.Node) -> int:
        """The bytes of an element of a node's output as its kernel computes it: on CPUs, half precision as float32."""
        dtype = node.outputs[0].dtype
        size = dtype.bitwidth // 8 if dtype is not None else 0
        return 4 if self.maps_weights and dtype in HALVES else size

    @cached_property
    def _moved(self) -> dict[ir.Node, tuple[int, tuple[int, ...]]]:
        """The bytes of weights and inputs that each node reads, and of each computed value that it reads or writes."""
        moved = {}
        for node, reads in self.graph.reads.items():
            written = tuple(map(self.value_bytes, node.outputs))
            if operator_of(node).reads_part:
                moved[node] = (sum(written), written)
            else:
                kept = {value for value in reads if value.producer() is None or value.producer() in self.graph.folded}
                computed = (*written, *(self.value_bytes(value) for value in reads if value not in kept))
                moved[node] = (sum(map(self.constant_bytes, kept)), computed)
        return moved


def node_flops(node: ir.Node, shapes: Mapping[str, Shape]) -> int:
    """Floating point operations of one node with bound shapes: 2 M N K for a product, else one per output element.

    A node with subgraphs costs one run of its most expensive subgraph. Unknown shapes count as one element.
    """
    inner = [sum(node_flops(n, shapes) for n in graph) for graph in subgraphs(node)]
    if inner:
        return max(inner)
    inputs, outputs = ([shape_of(value, shapes) for value in values] for values in (node.inputs, node.outputs))
    flops = operator_of(node).flops
    return flops(node, inputs, outputs) if flops is not None else math.prod(outputs[0] if outputs else ())
