"""Gives GroupQueryAttention of the model itself the lengths of its caches, where it reads them off the caches' shapes.

onnxscript's fusions write it so: the number of filled rows is the length of a past and the new tokens. With spare
capacity that length would be the capacity. So the lengths come from inputs of their own (lengths.py), on GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from splitc.compiler.caches.cache import ROWS
from splitc.compiler.caches.grouped import BIAS, LASTS, PASTS, QUERY, TOTAL
from splitc.compiler.caches.lengths import Lengths
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.walks import reached
from splitc.compiler.nodes import inputs_of, operator_name
from splitc.compiler.operators.gpu_kernels import GROUPED
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.sizes import Sizes
from splitc.runtime.arrays.array import Array
from splitc.runtime.package.states import State

# The indices of the operator's outputs for the caches.
PRESENTS = (1, 2)


def find_adopted(graph: ir.Graph, states: Sequence[State]) -> Sequence[ir.Node]:
    """The attentions with caches of a graph, if the lengths of all of them are read off the shapes of pasts."""
    inputs = {value.name: value for value in graph.inputs}
    growing = {inputs.get(state.input) for state in states if state.grows == ROWS}
    nodes = [
        node
        for node in graph
        if operator_name(node) == GROUPED and all(node.inputs[place] in growing for place in PASTS)
    ]
    pasts = set(pasts_of(nodes))
    return nodes if all(_reads_length(node, pasts) for node in nodes) else []


def pasts_of(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """The inputs of attentions that are their pasts."""
    return [value for node in nodes for place in PASTS if (value := node.inputs[place]) is not None]


def _reads_length(node: ir.Node, pasts: Collection[ir.Value]) -> bool:
    """Whether the number of filled rows follows from the shape of a past."""

    def above(value: ir.Value) -> list[ir.Value]:
        maker = value.producer()
        return [] if maker is None or is_onnx(maker, "Shape") else inputs_of(maker)

    total = node.inputs[TOTAL]
    shapes = [] if total is None else [value.producer() for value in reached([total], above)]
    return any(is_onnx(maker, "Shape") and maker is not None and maker.inputs[0] in pasts for maker in shapes)


def adopt(node: ir.Node, lengths: Lengths, sizes: Sizes, constants: Sequence[Mapping[str, Array]]) -> None:
    """Give an attention the lengths of its caches, in place.

    `constants` are the results of shape arithmetic, for both sets of sizes. Raises NotFusedError if the attention's
    lengths are others, or if a size of its caches can't be read elsewhere; then nothing is changed.
    """
    query = node.inputs[QUERY]
    pasts, presents = pasts_of([node]), [node.outputs[place] for place in PRESENTS]
    bias = node.inputs[BIAS] if len(node.inputs) > BIAS else None
    axes = sizes.axes(presents[0])
    if query is None or axes is None or (bias is not None and sizes.axes(bias) is None):
        raise NotFusedError("the sizes of its queries, caches or bias are not known")
    for made, after in zip(constants, axes[ROWS].size, strict=True):
        for place, wanted in ((TOTAL, after), (LASTS, after - 1)):
            value = node.inputs[place]
            number = None if value is None else made.get(value.name or "")
            if number is None or (number != wanted).any():
                raise NotFusedError("its caches are not filled by all tokens of the past and of the request")
    filled = lengths.of(pasts[0], query, presents[0])
    stale = [value for pair in zip(pasts, presents, strict=True) for value in pair]
    lengths.check_sizes(stale, filled)
    lengths.rewrite_sizes(stale, filled)
    node.replace_input_with(LASTS, filled.lasts)
    node.replace_input_with(TOTAL, filled.total)
    if bias is not None:
        node.replace_input_with(BIAS, filled.with_room(bias, lengths.writer(node, filled)))
    lengths.are_in_place(pasts, filled, one_row=True)
