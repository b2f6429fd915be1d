"""The order in which ONNX Runtime runs a graph's nodes, and the memory that it takes for what they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.analysis.arena import Arena, Place
from splitc.compiler.analysis.gelus import GELUS, biased_gelus, find_gelus
from splitc.compiler.analysis.liveness import Reads, Size, is_view
from splitc.compiler.frontend.reads import subgraphs
from splitc.compiler.operators.registry import operator_of

_ENDS_GELU = (*GELUS, "Mul")


def execution_order(nodes: Sequence[ir.Node], reads: Reads) -> list[ir.Node]:
    """The nodes of a file in the order in which ONNX Runtime runs them.

    Nodes that its optimizer has made count as the last in the file, in the order in which it found them, pass by pass.
    That decides which branch comes first where two read one value: a block's MLP or its attention, queries or values.
    """
    return _order(nodes, reads, biased_products(nodes, reads))


def _order(nodes: Sequence[ir.Node], reads: Reads, biased: Mapping[ir.Node, ir.Node]) -> list[ir.Node]:
    position = {node: number for number, node in enumerate(nodes)}
    for is_made in (biased.__contains__, _follows_view, lambda node: _ends_gelu(node, biased)):
        if any(map(is_made, nodes)):
            made = [node for node in _depth_first(nodes, reads, position) if is_made(node)]
            position.update((node, len(nodes) + number) for number, node in enumerate(made, max(position.values())))
    return _depth_first(nodes, reads, position)


def _depth_first(nodes: Sequence[ir.Node], reads: Reads, position: Mapping[ir.Node, int]) -> list[ir.Node]:
    """From the nodes that no other one reads up to what they read, depth first, the last node of the file first.

    It is the order of Graph::ReverseDFSFrom (core/graph/graph.cc), and not that of the file.
    """
    above = {node: _producers(node, reads, position) for node in nodes}
    read = {maker for makers in above.values() for maker in makers}
    stack = [(node, False) for node in sorted(nodes, key=position.__getitem__) if node not in read]
    seen: set[ir.Node] = set()
    order = []
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(maker, False) for maker in above[node] if maker not in seen]
    return order


def biased_products(nodes: Sequence[ir.Node], reads: Reads) -> dict[ir.Node, ir.Node]:
    """The additions of a bias that ONNX Runtime makes one Gemm with the product before them, each with that product.

    Their weights are matrices. If the product has a batch, it does so only where sizes are fixed in the file
    (MatMulAddFusion, core/optimizer/matmul_add_fusion.cc).
    """
    readers = Counter(value for node in nodes for value in reads(node))
    biased = {}
    for node in nodes:
        product, bias = (*node.inputs, None, None)[:2] if node.op_type == "Add" else (None, None)
        if product is not None and product.producer() is None:
            product, bias = bias, product
        maker = product.producer() if product is not None else None
        if product is None or bias is None or maker is None or maker.op_type != "MatMul":
            continue
        image, weight = (value.shape if value is not None else None for value in maker.inputs[:2])
        is_alone = readers[product] == 1 and not product.is_graph_output()
        is_small = bias.shape is not None and bias.producer() is None and len(bias.shape) == 1
        if not is_alone or not is_small or image is None or weight is None or len(weight) != 2:
            continue
        if len(image) == 2 or (len(image) > 2 and image.is_static()):
            biased[node] = maker
    return biased


def _follows_view(node: ir.Node) -> bool:
    """Whether ONNX Runtime makes one Reshape of this one and the one before it."""
    maker = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] is not None else None
    return maker is not None and maker.op_type == "Reshape"


def _producers(node: ir.Node, reads: Reads, position: Mapping[ir.Node, int]) -> list[ir.Node]:
    makers = {maker for value in reads(node) if (maker := value.producer()) in position and maker is not None}
    return sorted(makers, key=position.__getitem__)


def _ends_gelu(node: ir.Node, biased: Container[ir.Node]) -> bool:
    """Whether the node ends a fusion to a Gelu: of one that is written out, or of one with the bias before it.

    What is `biased` already has become part of a product.
    """
    above = [value.producer() for value in node.inputs if value is not None] if node.op_type in _ENDS_GELU else []
    if node.op_type in GELUS:
        return any(maker is not None and maker.op_type == "Add" and maker not in biased for maker in above)
    return any(_reads_erf(maker, 2) for maker in above if maker is not None)


def _reads_erf(node: ir.Node, steps: int) -> bool:
    if node.op_type == "Erf":
        return True
    makers = (value.producer() for value in node.inputs if value is not None) if node.op_type in ("Add", "Mul") else ()
    return steps > 0 and any(_reads_erf(maker, steps - 1) for maker in makers if maker is not None)


def merged(nodes: Sequence[ir.Node], reads: Reads) -> tuple[list[ir.Node], Reads]:
    """The nodes without those that compute what one before them does, and what each reads then.

    ONNX Runtime merges them (core/optimizer/common_subexpression_elimination.cc).
    """
    first: dict[Hashable, ir.Node] = {}
    same = dict[ir.Value, ir.Value]()
    kept = []
    for node in nodes:
        inputs = tuple(value and same.get(value, value) for value in node.inputs)
        how = frozenset((name, str(attribute.value)) for name, attribute in node.attributes.items())
        other = first.setdefault((node.domain, node.op_type, inputs, how), node)
        if other is node or operator_of(node).random or any(subgraphs(node)):
            kept.append(node)
        else:
            same.update(zip(node.outputs, other.outputs, strict=False))
    return kept, lambda node: [same.get(value, value) for value in reads(node)]


def arena_bytes(
    nodes: Sequence[ir.Node],
    reads: Reads,
    size: Size,
    scratch: Callable[[ir.Node], tuple[int, ...]],
    kept: AbstractSet[ir.Value],
    parts: Callable[[ir.Node], tuple[int, ...]] = lambda node: (),
    on_host: bool = True,
) -> int:
    """The bytes of its arena that ONNX Runtime uses in one run of the nodes, from an empty arena on.

    A value is allocated before its node runs, and freed after its last reader; `kept` ones, which leave the engine, are
    not. `scratch` is what a node's kernel allocates while it runs. A view is its source. What ranks make a value of are
    `parts`: the node makes the first one, others come from other ranks. Where the system places regions decides which
    of two free chunks of one size is used: it is the more of both ways. `on_host` is as for `Arena`.
    """
    nodes, reads, gelus = find_gelus(*merged(nodes, reads))
    biased = biased_products(nodes, reads)
    order = _order(nodes, reads, biased)
    source = {node.outputs[0]: first for node in order if (first := _viewed(node, size)) is not None}
    # What a product would make without its bias is never there. What is summed over ranks first gets no bias before.
    products = [product for product in biased.values() if not parts(product)]
    source.update((node.outputs[0], first) for node in products if (first := node.inputs[0]) is not None)
    copies = biased_gelus(gelus, nodes, reads, biased)
    source.update((gelus[node], data) for node, data in copies.items())

    def root(value: ir.Value) -> ir.Value:
        while value in source:
            value = source[value]
        return value

    held = {root(value) for value in kept}
    steps: list[Step] = []
    for node, last in zip(order, _last_uses(order, reads, root), strict=True):
        made = tuple((value, bytes_) for value in node.outputs if value not in source and (bytes_ := size(value)))
        copy = (size(node.outputs[0]),) if node in copies else ()
        taken, reserved = ((), scratch(node)) if operator_of(node).reserves else ((*scratch(node), *copy), ())
        freed = tuple(value for value in last if value not in held)
        steps += _in_parts(Step(made, taken, reserved, freed), parts(node))
    return max(_touched(steps, Arena(downwards, on_host)) for downwards in (True, False))


@dataclass(frozen=True)
class Step:
    """A node's allocations: values, or parts of one, with their bytes, and its scratch; and what is freed after it.

    What is `reserved` is scratch that is taken past the arena.
    """

    made: tuple[tuple[Hashable, int], ...]
    scratch: tuple[int, ...]
    reserved: tuple[int, ...]
    freed: tuple[Hashable, ...]


def _in_parts(step: Step, sizes: Sequence[int]) -> list[Step]:
    """The step of a node that makes the first of some parts, and one in which its value is made of all of them."""
    if not sizes:
        return [step]
    parts = [((step.made, number), bytes_) for number, bytes_ in enumerate(sizes)]
    own = {value for value, _ in step.made}
    unread = [value for value in step.freed if value in own]
    return [
        Step((parts[0],), step.scratch, step.reserved, tuple(value for value in step.freed if value not in own)),
        Step((*parts[1:], *step.made), (), (), (*dict(parts), *unread)),
    ]


def _touched(steps: Iterable[Step], arena: Arena) -> int:
    """The bytes of the arena that are used after these steps."""
    places = dict[Hashable, Place]()
    for step in steps:
        places.update((value, arena.allocate(size)) for value, size in step.made)
        arena.pass_by(step.scratch)
        arena.reserve(step.reserved)
        for value in step.freed:
            if value in places:
                arena.free(places.pop(value))
    return arena.touched


def _last_uses(order: Sequence[ir.Node], reads: Reads, root: Callable[[ir.Value], ir.Value]) -> list[list[ir.Value]]:
    """For each node the values that nothing uses after it."""
    death: dict[ir.Value, int] = {}
    for number, node in enumerate(order):
        for value in (*reads(node), *node.outputs):
            death[root(value)] = number
    dying: list[list[ir.Value]] = [[] for _ in order]
    for value, number in death.items():
        dying[number].append(value)
    return dying


def _viewed(node: ir.Node, size: Size) -> ir.Value | None:
    """The value of which the node's result is a view; None if the result has memory of its own."""
    first = node.inputs[0] if is_view(node, size) else None
    return first if first is not None and first.producer() is not None else None
