"""Loops with a fixed number of iterations become that many copies of their bodies.

So what is in them is cut, fused and replayed as everything else. JAX writes the layers of a model as a scan over
stacked weights, and torch's older exporter writes a loop that fills a list.

See Loop and Scan in ONNX's Operators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import is_onnx, source_through
from splitc.compiler.graphs.reads import is_random, node_reads, subgraphs
from splitc.compiler.graphs.unused import disconnect_subgraphs
from splitc.compiler.inference.iterations import LEADING, iterations, numbers_given
from splitc.compiler.nodes import inputs_of

# The most iterations of a loop, and the most nodes of all copies in a model. A choice: models have up to 130 layers,
# and plans of 10,000 nodes take half a minute. A loop over the tokens of a text stays.
ITERATIONS, NODES = 160, 10_000
# The opset from which on Scan has no batches.
OPSET = 9
LOOPS = ("Loop", "Scan")


@dataclass(frozen=True)
class Repeated:
    """A Loop or Scan with a fixed number of iterations.

    - `carried`: the initial values of its state variables.
    - `parted`: the inputs of which each iteration of a Scan reads one element along the first axis.
    - `editor`: of the main graph, which the node is in.
    """

    node: ir.Node
    count: int
    carried: Sequence[ir.Value]
    parted: Sequence[ir.Value]
    editor: Editor

    @property
    def body(self) -> ir.Graph:
        return self.node.attributes["body"].as_graph()

    @property
    def nodes(self) -> int:
        """The number of nodes of all copies."""
        return self.count * sum(1 for _ in self.body.all_nodes())

    def unroll(self) -> list[ir.Node]:
        """Put copies of the body in the loop's place. Returns the loops in them."""
        states, lead = len(self.carried), int(self.node.op_type == "Loop")
        _hand_on(self.body)
        inner = [one for one in self._moved_out() if is_onnx(one, *LOOPS)]
        carried = list(self.carried)
        scanned: list[list[ir.Value]] = [[] for _ in self.body.outputs[lead + states :]]
        for number in range(self.count):
            given = [*self._numbers(number), *carried, *(self._part(one, number) for one in self.parted)]
            made, results = self.copy(given, number)
            inner += [one for one in made if is_onnx(one, *LOOPS)]
            carried = results[lead : lead + states]
            for parts, part in zip(scanned, results[lead + states :], strict=True):
                axes, attributes = self.editor.lists("Unsqueeze", axes=[0])
                parts.append(self._before("Unsqueeze", part, *axes, **attributes))
        joined = [self._before("Concat", *parts, axis=0) for parts in scanned]
        for old, new in zip(self.node.outputs, [*carried, *joined], strict=True):
            self._put(old, new)
        disconnect_subgraphs(self.node)  # which would still read weights
        self.editor.graph.remove(self.node, safe=True)
        return inner

    def _moved_out(self) -> list[ir.Node]:
        """Put before the loop what each iteration computes alike, as a cell's weights in an LSTM's layout."""
        given, moved = set(self.body.outputs), list[ir.Node]()
        for node in list(self.body):
            reads = any(value.graph is self.body for value in node_reads(node))
            if not reads and not is_random(node) and given.isdisjoint(node.outputs):
                self.body.remove(node)
                self.node.prepend(node)
                for one in (node, *_inside(node)):
                    self.editor.name(one, one.name or "")
                moved.append(node)
        return moved

    def _numbers(self, number: int) -> list[ir.Value]:
        """What a Loop tells its body."""
        numbers = numbers_given(self.body, number) if self.node.op_type == "Loop" else []
        return [self.editor.constant(array) for array in numbers]

    def _part(self, value: ir.Value, number: int) -> ir.Value:
        return self._before("Gather", value, self.editor.constant(np.array(number, np.int64)), axis=0)

    def copy(self, given: Sequence[ir.Value], number: int) -> tuple[list[ir.Node], list[ir.Value]]:
        """The nodes of a copy of the body, before the loop, and its results."""
        body = self.body.clone(allow_outer_scope_values=True)
        replaced = dict(zip(body.inputs, given, strict=True))
        results, nodes = [replaced.get(value, value) for value in body.outputs], list(body)
        body.outputs.clear()  # a value that is only handed on has no node
        for inside, outside in replaced.items():
            inside.replace_all_uses_with(outside)
        body.remove(nodes)
        self.node.prepend(nodes)
        for made in (one for node in nodes for one in (node, *_inside(node))):
            self.editor.name(made, f"{made.name}/{number}")
            for value in made.outputs:
                if value.name:
                    self.editor.name(value, f"{value.name}/{number}")
        return nodes, results

    def _before(self, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        made = self.editor.before(self.node, operator, *inputs, **attributes)
        self.editor.name(made, f"{self.node.outputs[0].name}/{operator}")
        return made

    def _put(self, old: ir.Value, new: ir.Value) -> None:
        """Put a value in the place of the loop's output, under its name if the model gives it."""
        if old.is_graph_output():
            name, old.name = old.name, None
            new = self.editor.before(self.node, "Identity", new)
            new.name, new.type, new.shape = name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def unroll_loops(model: ir.Model) -> None:
    """Replace loops with a fixed number of iterations, in place. Loops in their bodies are replaced after them."""
    pending = [node for node in model.graph if is_onnx(node, *LOOPS)]
    if not pending or model.graph.opset_imports.get("", 0) < OPSET:
        return
    editor, left = Editor(model.graph), NODES
    while pending:
        repeated = _repeated(pending.pop(), editor)
        if repeated is not None and repeated.nodes <= left:
            left -= repeated.nodes
            pending += repeated.unroll()


def _repeated(node: ir.Node, editor: Editor) -> Repeated | None:
    """The loop of a node; None if it is not known how often it runs, or if it runs too often."""
    inputs = inputs_of(node)
    if node.op_type == "Loop":
        carried, parted = [value for value in node.inputs[LEADING:] if value is not None], list[ir.Value]()
        count = iterations(node, ITERATIONS)
    else:
        place = len(inputs) - node.attributes["num_scan_inputs"].as_int()
        carried, parted = inputs[:place], inputs[place:]
        # Of weights only: a scan over time has one set of weights for all steps.
        lengths = [value.shape[0] for value in parted if value.is_initializer() and value.shape is not None]
        # That of an optional input may be dynamic.
        known = [length for length in lengths if isinstance(length, int)]
        count = 0 if not known or _scans_otherwise(node) else known[0]
    return Repeated(node, count, carried, parted, editor) if 0 < count <= ITERATIONS else None


def _scans_otherwise(scan: ir.Node) -> bool:
    """Whether a Scan reads or writes along other axes than the first one, or backwards."""
    lists = [attribute for name, attribute in scan.attributes.items() if name not in ("body", "num_scan_inputs")]
    return any(any(attribute.as_ints()) for attribute in lists)


def _hand_on(body: ir.Graph) -> None:
    """Let a body give itself what it hands on by an Identity, in place. Else a stack of weights would have two readers.

    JAX's exporter writes stacks as states that each iteration hands on.
    """
    for place, value in enumerate(body.outputs):
        source = source_through(value, "Identity")
        if source.graph is body:
            body.outputs[place] = source
    for node in [node for node in body if is_onnx(node, "Identity")][::-1]:
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            body.remove(node, safe=True)


def _inside(node: ir.Node) -> list[ir.Node]:
    """The nodes of a node's subgraphs, at any depth."""
    return [inner for graph in subgraphs(node) for inner in graph.all_nodes()]
