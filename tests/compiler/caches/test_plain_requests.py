"""Which masks hide later tokens, or those before a window, if the padding mask is all ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

from splitc.compiler.caches.plain_requests import Plain, find_plain
from splitc.compiler.patterns.sizes import Axis, fixed_axis
from splitc.runtime.package.manifest import Role

ONE, PAST, NEW, ALL = (Axis(size) for size in ((1, 3), (0, 7), (16, 13), (16, 20)))
AXES = {"ids": (ONE, NEW), "kept": (ONE, ALL), "past": (PAST, fixed_axis(0)), "lasts": (ONE,)}
ROLES = {"kept": Role("mask"), "ids": Role("indices")}
# Truths of what a query at `row` sees of keys at `column`, with some `number`.
CAUSAL = "shown = LessOrEqual (columns, rows)"
WINDOW = """causal = LessOrEqual (columns, rows)
            edge = Sub (rows, number)
            near = Greater (columns, edge)
            shown = And (causal, near)"""
CHUNKS = """causal = LessOrEqual (columns, rows)
            chunk = Div (rows, number)
            other = Div (columns, number)
            same = Equal (chunk, other)
            shown = And (causal, same)"""
# Of as many numbers as there are.
PRODUCT = WINDOW.replace("number)", "all)", 1).replace("edge", "all = Mul (number, number)  edge", 1)
# A query sees its own chunk and some before it.
FEW_CHUNKS = """causal = LessOrEqual (columns, rows)
            chunk = Div (rows, number)
            other = Div (columns, number)
            apart = Sub (chunk, other)
            most = Constant <value_int = 9> ()
            same = Less (apart, most)
            shown = And (causal, same)"""
PREFIX = """causal = LessOrEqual (columns, rows)
            prefix = Less (columns, number)
            shown = Or (causal, prefix)"""
SHARED = "shown = GreaterOrEqual (columns, zero)"


# Of a table with a row for each of some keys.
TABLE = """table = Expand (yes, number_list)
            causal = LessOrEqual (columns, rows)
            part = Slice (table, first, after_list, first)
            shown = And (causal, part)"""


def _graph(rule: str, number: int) -> ir.Graph:
    return ir.from_onnx_text(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        agraph (int64[b, n] ids, int64[b, a] kept, bool[p, 0] past) => (float[b, 1, n, a] mask)
            <int64[1] first = {{0}}, int64[1] second = {{1}}, int64[2] inner = {{1, 2}}, int64 zero = {{0}},
             int64 one = {{1}}, int64 number = {{{number}}}, int64[1] number_list = {{{number}}}, bool[1] yes = {{1}},
             float none = {{0.0}}, float low = {{-10000.0}}> {{
            before_list = Shape <end = 1> (past)
            before = Squeeze (before_list)
            new_list = Shape <start = 1> (ids)
            new = Squeeze (new_list)
            after = Add (before, new)
            after_list = Unsqueeze (after, first)
            keys = Range (zero, after, one)
            columns = Unsqueeze (keys, first)
            queries = Range (before, after, one)
            rows = Unsqueeze (queries, second)
            {rule}
            tokens = Cast <to = 9> (kept)
            kept_by_rows = Unsqueeze (tokens, inner)
            both = And (shown, kept_by_rows)
            mask = Where (both, none, low)
        }}"""
    ).graph


def _plain(
    graph: ir.Graph, roles: Mapping[str, Role] = ROLES, known: Mapping[str, tuple[Axis, ...]] = AXES
) -> Plain | None:
    values = {value.name: value for value in graph.inputs}
    filled: Any = SimpleNamespace(past=PAST, all=ALL, step=("ids", 1), lasts=ir.Value(name="lasts"), room=None)
    axes = {name: own for name, own in known.items() if name == "lasts" or name in values}
    sizes: Any = SimpleNamespace(
        axes=lambda value: axes.get(value.name), shapes={"ids": (1, 16)}, probes={"ids": (3, 13)}
    )
    return find_plain(
        graph, ["mask"], [], [filled], sizes, [name for name, role in roles.items() if role.kind == "mask"]
    )


@pytest.mark.parametrize(
    ("rule", "number", "expected"),
    [
        (CAUSAL, 1, {}),
        (WINDOW, 1, {"mask": 1}),
        (WINDOW, 4, {"mask": 4}),
        (WINDOW, 4096, {"mask": 4096}),
        (CHUNKS, 2048, None),
        (PRODUCT, 32, {"mask": 1024}),
        (FEW_CHUNKS, 64, None),
        (PREFIX, 3, None),
        (SHARED, 1, None),
        (TABLE, 8, None),  # the model fails beyond
        (CAUSAL, 10**6, None),  # too many tokens to try
    ],
)
def test_masks_are_tried_beyond_all_numbers_in_them(rule: str, number: int, expected: dict[str, int] | None) -> None:
    assert _plain(_graph(rule, number)) == (None if expected is None else Plain(("kept",), expected))


def test_what_tells_padding_may_have_a_batch_of_its_own() -> None:
    axes = {**AXES, "kept": (Axis((1, 5)), ALL)}
    assert _plain(_graph(CAUSAL, 1), known=axes) == Plain(("kept",), {}, ("kept",))


def test_masks_that_follow_from_more_than_what_tells_padding_are_computed() -> None:
    graph = _graph(CAUSAL, 1)
    assert _plain(graph) is not None
    assert _plain(graph, {"kept": Role("indices")}) is None
