"""What ranks add, as nodes of a rank's graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from models.writer import Writer
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.fused import fuse
from splitc.compiler.execution.run import arena_bytes
from tests.helpers.profiles import named, reads

BYTES = 3 << 18


def test_sums_are_made_in_the_order_of_the_file() -> None:
    """Tokens chain them, where ONNX Runtime would go to the last branch first."""
    w = Writer(opset=17)
    x = w.input("x", ir.DataType.FLOAT, ["n", 64])
    one, other = (w.op("MatMul", x, w.weight(f"w{n}", ir.tensor(np.ones((64, 64), np.float32)))) for n in range(2))
    w.output(w.op("Sub", w.op("Elu", other), w.op("Elu", one)), "y", ir.DataType.FLOAT, ["n", 64])
    graph = named(w.model()).graph

    def order_of(*summed: ir.Value) -> list[str]:
        sums = {value: value for value in summed}
        engine = EngineGraph(list(graph), reads, lambda v: BYTES, frozenset(graph.outputs), summed=sums)
        return [node.op_type if node.domain else node.name or "" for node in fuse(engine).nodes.order]

    assert order_of() == ["node0", "node3", "node1", "node2", "node4"]
    assert order_of(one, other) == ["node0", "AllReduce", "node3", "node1", "AllReduce", "node2", "node4"]


def test_what_a_rank_only_passes_on_is_no_node() -> None:
    """Of a product and a bias, the rank that does not add the bias gives the product to the sum."""
    w = Writer(opset=17)
    x = w.input("x", ir.DataType.FLOAT, ["n", 64])
    product = w.op("MatMul", x, w.weight("weight", ir.tensor(np.ones((64, 64), np.float32))))
    total = w.op("Add", product, w.weight("bias", ir.tensor(np.ones(64, np.float32))))
    w.output(w.op("Softmax", total), "y", ir.DataType.FLOAT, ["n", 64])
    graph = w.model().graph

    def order_of(part: ir.Value) -> list[str]:
        ends = frozenset(graph.outputs)
        engine = EngineGraph(list(graph), reads, lambda v: BYTES, ends, summed={total: part})
        return [node.op_type for node in fuse(engine).nodes.order]

    assert order_of(total) == ["MatMul", "Add", "AllReduce", "Softmax"]
    assert order_of(product) == ["MatMul", "AllReduce", "Softmax"]


def test_a_factor_of_1_after_a_part_is_no_node() -> None:
    """Exporters write such a factor behind the projections of denoisers. Ranks add what it reads."""
    w = Writer(opset=17)
    x = w.input("x", ir.DataType.FLOAT, ["n", 64])
    scaled = w.op("Div", w.op("Elu", x), w.weight("one", ir.tensor(np.array(1, np.float32))))
    w.output(w.op("Softmax", scaled), "y", ir.DataType.FLOAT, ["n", 64])
    graph = w.model().graph
    sizes = {value: BYTES for node in graph for value in node.outputs}
    engine = EngineGraph(
        list(graph), reads, lambda v: sizes.get(v, 0), frozenset(graph.outputs), summed={scaled: scaled}
    )
    assert arena_bytes(engine, lambda node: (), on_host=False) < 2.1 * BYTES
