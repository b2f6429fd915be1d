"""Reshapes that fusion leaves behind each other: an operator takes three axes where the exporter wrote four.

Each is a node that an engine runs, and takes some microseconds of the host's time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.fusion.operand import VIEWS
from splitc.compiler.fusion.sizes import Sizes


def join_views(editor: Editor, sizes: Sizes) -> None:
    """Let views read what other views are made of, and drop those that give it back as it was, in place.

    What nothing reads any more stays. Nothing is done unless sizes can be told apart.
    """
    if not sizes.differ:
        return
    for node in [node for node in editor.graph if _is_view(node)]:
        made, own = node.outputs[0], sizes.of(node.outputs[0])
        sources = list(_sources(node, sizes))
        restored = next((value for value in reversed(sources) if sizes.of(value) == own), None)
        if restored is not None and not made.is_graph_output():
            made.replace_all_uses_with(restored)
            continue
        for source in reversed(sources[1:]):
            if (numbers := _shape_for(node, source, sizes)) is not None:
                node.replace_input_with(0, source)
                node.replace_input_with(1, editor.constant(np.array(numbers, np.int64)))
                break


def _is_view(node: ir.Node) -> bool:
    return node.op_type in VIEWS and not node.domain


def _sources(node: ir.Node | None, sizes: Sizes) -> Iterator[ir.Value]:
    """What a view reads, and what that is a view of, as far as the sizes are known."""
    while node is not None and _is_view(node):
        value = node.inputs[0]
        if value is None or sizes.of(value) is None:
            return
        yield value
        node = value.producer()


def _shape_for(node: ir.Node, source: ir.Value, sizes: Sizes) -> list[int] | None:
    """The sizes by which a Reshape makes the same of a source; None if no constant says them."""
    shape = node.inputs[1].const_value if node.op_type == "Reshape" and node.inputs[1] is not None else None
    if shape is None or node.attributes.get_int("allowzero", False):
        return None
    old, new = (None if value is None else sizes.of(value) for value in (node.inputs[0], source))
    assert old is not None and new is not None
    numbers: list[int] = shape.numpy().tolist()
    lost = [n for n, number in enumerate(numbers) if number == 0 and not (n < len(new) and old[n] == new[n])]
    if len(lost) == 1 and numbers.count(0) == 1 and -1 not in numbers:
        numbers[lost.pop()] = -1  # with a size that is kept, which may be 0, it could not be found
    return None if lost else numbers
