"""Merges the query, key and value projections of attention with a cache into one product and a Split, on GPUs.

For a single token the projections are small: the key and value weights of an 8B decoder are 8 MiB each, which a GPU
reads in little more than the time of a launch. On an H100 in half precision a token of such a decoder takes 1.05 times
as long with three products.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.lazy_tensors import JoinedTensor
from splitc.compiler.frontend.node_key import node_key
from splitc.compiler.frontend.origins import take_place
from splitc.compiler.frontend.walks import producers, reached
from splitc.compiler.fusion.grouped import PASTS
from splitc.compiler.lowering.weight_products import columns_of, has_own_weight, is_product, weight_of
from splitc.compiler.nodes import settings_of
from splitc.compiler.operators.registry import operator_of

ATTENTION = ("com.microsoft", "GroupQueryAttention")
# The operator's inputs for queries, keys and values.
PARTS = slice(3)
# ONNX Runtime has a kernel for a Split into three parts of any sizes (Split3Inner). A Split into two has to copy the
# sizes to the GPU.
COUNT = 3


def join_products(graph: ir.Graph) -> None:
    """Merge the query, key and value projections of attention with a cache, if they are of one value, in place."""
    editor = Editor(graph)
    for node in list(graph):
        if (
            (node.domain, node.op_type) == ATTENTION
            and len(node.inputs) > PASTS[0]
            and node.inputs[PASTS[0]] is not None
        ):
            groups: dict[Any, list[ir.Node]] = {}
            products = _products(node)
            for product in (node for node in graph if node in products):
                groups.setdefault(_kind(product), []).append(product)
            for group in groups.values():
                if len(group) == COUNT:
                    _join(group, editor)


def _products(attention: ir.Node) -> set[ir.Node]:
    """The nearest products before an attention's queries, keys and values, if nothing else reads their weights."""
    above = reached(
        producers(attention.inputs[PARTS]),
        lambda node: () if is_product(node) or operator_of(node).reads_shape else producers(node.inputs),
    )
    return {node for node in above if is_product(node) and has_own_weight(node)}


def _kind(product: ir.Node) -> Any:
    """A key that is equal for products that can be merged."""
    _, tensor = weight_of(product)
    return product.inputs[0], node_key(product), tensor.dtype, tensor.shape.numpy()[1 - columns_of(product)]


def _join(products: list[ir.Node], editor: Editor) -> None:
    """Replace the products by one product and a Split, inserted before the first one."""
    first, axis = products[0], columns_of(products[0])
    weights = [weight_of(product) for product in products]
    name = "+".join(weight.name or "" for weight, _ in weights)
    joined = editor.weight(JoinedTensor([tensor for _, tensor in weights], axis, name))
    made = editor.before(first, first.op_type, first.inputs[0], joined, domain=first.domain, **settings_of(first))
    made.name, made.type = f"{first.outputs[0].name}/joined", first.outputs[0].type
    sizes, how = editor.lists("Split", split=[tensor.shape.numpy()[axis] for _, tensor in weights])
    split = ir.node("Split", [made, *sizes], {"axis": -1, **how}, num_outputs=COUNT)
    editor.graph.insert_before(first, split)
    for product, (weight, _), new in zip(products, weights, split.outputs, strict=True):
        take_place(new, product.outputs[0])
        editor.graph.remove(product, safe=True)
        del editor.graph.initializers[weight.name or ""]
