"""The memory of an engine's weights in ONNX Runtime on a CPU, and its peak while they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.adapters.slots import is_slot_input
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.execution.convolutions import find_parts, resolve
from splitc.compiler.execution.exchange import NodeShapes
from splitc.compiler.execution.liveness import Nodes
from splitc.compiler.execution.quantized import REPACKED, repacked_weights
from splitc.compiler.graphs.reads import holds_graphs
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.operators.registry import operator_of

# The copies of a convolution's kernel beside its blocked form while it is rearranged: as read, reordered, as a tensor.
COPIES = 3


def packed_bytes(costs: Costs, nodes: Collection[ir.Node], weights: Mapping[ir.Value, int], shapes: NodeShapes) -> int:
    """The bytes of weights in an engine that runs the nodes. For `shapes` see `Held`."""
    more = sum(packed.bytes - packed.source for packed in _packed(costs, nodes, weights, shapes))
    return more + sum(costs.weight_in_memory(weight, size) for weight, size in weights.items())


@dataclass(frozen=True)
class Loading:
    """The peak bytes of weights while an engine is loaded, and while it is only optimized.

    `made` are the bytes that optimization produces, which are in no file: folded constants, and kernels in blocks.
    """

    most: int = 0
    optimizing: int = 0
    made: int = 0

    def beside(self, folded: int) -> Loading:
        """The same with further folded constants of this many bytes, which no product packs."""
        return Loading(self.most + folded, self.optimizing + folded, self.made + folded) if folded else self


def find_loading(
    costs: Costs, nodes: Collection[ir.Node], weights: Mapping[ir.Value, int], shapes: NodeShapes
) -> Loading:
    """The memory of an engine of the nodes while it is loaded; nothing if engines do not pack weights.

    First it folds (see `Costs.folding`), and multiplies kernels by the factors after them. Then it rearranges kernels
    of convolutions into blocks, one by one (core/optimizer/nchwc_transformer.cc). Folded or multiplied kernels are
    freed when all are done. Last it packs matrices, one by one, from their mapped files or from folded constants, each
    of which is then freed (PrepackConstantInitializedTensors, core/framework/session_state.cc). Requests read the
    weights that are not packed.
    """
    if not costs.maps_weights:
        return Loading()
    # float16 weights are cast, and the casts are folded too.
    scaled, repacked = _scaled_kernels(costs, nodes), set(repacked_weights(nodes).values())
    made = [w for w in weights if w.producer() is not None or costs.weight_in_memory(w, 1) > 1 or w in scaled]
    folded = {weight: costs.weight_in_memory(weight, weights[weight]) for weight in made}
    folded |= {weight: int(size * REPACKED[0]) for weight, size in weights.items() if weight in repacked}
    most, waiting, done = _folding(costs, nodes, weights), sum(folded.values()), 0
    packed = list(_packed(costs, nodes, weights, shapes))
    for own in (own for own in packed if own.is_kernel):
        done += own.bytes
        most = max(most, waiting + done + COPIES * own.source)
    waiting -= sum(folded.get(own.weight, 0) for own in packed if own.is_kernel)
    optimizing, made_bytes = most, waiting + done
    for own in (own for own in packed if not own.is_kernel):
        waiting -= folded.get(own.weight, 0)
        done += own.bytes
        most = max(most, waiting + done + own.beside)
    # Weights of subgraphs are kept unpacked until all subgraphs have packed theirs.
    inner = sum(weights.get(weight, 0) for weight in costs.held(node for node in nodes if holds_graphs(node)))
    most = max(most, waiting + done + 2 * inner)
    return Loading(most, optimizing, made_bytes)


@dataclass(frozen=True)
class _Packed:
    """A weight that a product packs: its own bytes, its packed bytes, and those read beside it during packing."""

    weight: ir.Value
    source: int
    bytes: int
    beside: int
    is_kernel: bool


def _packed(
    costs: Costs, nodes: Collection[ir.Node], weights: Mapping[ir.Value, int], shapes: NodeShapes
) -> Iterator[_Packed]:
    """The weights that products pack, in the order of packing."""
    seen, scales = set[ir.Value](), costs.packed_scales(nodes)
    repacked = repacked_weights(nodes) if costs.maps_weights else {}
    for node in nodes:
        if (weight := repacked.get(node)) is not None and weight in weights:
            first, last = (int(weights[weight] * share) for share in REPACKED)
            yield _Packed(weight, weights[weight], last, first, False)
            continue
        padding = costs.padding_of(node, *shapes(node)) if costs.is_product(node) else None
        if padding is None:
            continue
        held = [weight for weight in costs.held([node]) if weight in weights and not is_slot_input(weight)]
        own = [weight for weight in held if weight not in seen]
        if not own:
            continue
        seen.update(own)
        *_, largest = own = sorted(own, key=weights.__getitem__)  # scales are packed with their weight
        for weight in own:
            size = costs.weight_in_memory(weight, weights[weight])
            more = padding * (weight is largest) + 2 * size * (weight in scales)
            beside = size + sum(weights[other] for other in own if weight is largest and other in scales)
            yield _Packed(weight, size, size + more, beside, operator_of(node).takes_blocks)


def _scaled_kernels(costs: Costs, nodes: Collection[ir.Node]) -> set[ir.Value | None]:
    """The kernels of convolutions that ONNX Runtime multiplies by a norm or a factor after them."""
    running, inside = [node for node in nodes if node not in costs.graph.folded], set(nodes)
    made = [value for node in running for value in node.outputs]
    kept = {v for v in made if v.is_graph_output() or any(use.node not in inside for use in v.uses())}
    parts = find_parts(Nodes(running, costs.graph.reads.__getitem__, kept))
    scaled = [value for value in parts if producer_of(value).op_type in ("BatchNormalization", "Mul")]
    return {producer_of(resolve(parts, value)).inputs[1] for value in scaled}


def _folding(costs: Costs, nodes: Collection[ir.Node], weights: Mapping[ir.Value, int]) -> int:
    """`Costs.folding` of a rank's shards of folded values."""
    whole = {value: size for value, size in costs.held(nodes).items() if value.producer() is not None}
    held = sum(weights.get(value, size) for value, size in whole.items())
    return costs.folding(nodes) * held // max(1, sum(whole.values()))
