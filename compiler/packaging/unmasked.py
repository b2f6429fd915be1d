"""Engines and preamble without masks (caches/masks.py), for requests whose masks hide only later tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
from msgspec.structs import replace

from splitc.compiler.attention.softmax import without_nan
from splitc.compiler.caches.grouped import BIAS
from splitc.compiler.caches.masks import KEPT, biased
from splitc.compiler.caches.preamble import Preamble, without_outputs
from splitc.compiler.graphs.unused import remove_unused, remove_unused_inputs
from splitc.compiler.packaging.onnx_files import write_model_files
from splitc.compiler.packaging.writer import PackageWriter
from splitc.runtime.package import manifest as m

# The preamble's graph, and the one without masks.
PREAMBLE, PLAIN_PREAMBLE = "preamble.onnx", "preamble.plain.onnx"


def without_masks(graph: ir.Graph, preamble: Preamble) -> ir.Graph | None:
    """A copy of a rank's graph with causal attention instead of the masks, in which no rows are entirely masked.

    Attention has a window where its mask has one. None if the graph has no masks, or reads one elsewhere.
    """
    masks = preamble.masks
    windows = {} if preamble.plain is None else preamble.plain.windows
    own = [value for value in graph.inputs if value.name in masks]
    if not own or any(node is None for value in own for node in biased(value)):
        return None
    plain = graph.clone()
    own = [value for value in plain.inputs if value.name in masks]
    for value in own:
        for node in [use.node for use in value.uses()]:
            _hide_later_tokens(node, windows.get(value.name or ""))
    blanks = [value for value in plain.inputs if value.name in preamble.blanks]
    for node in [use.node for value in blanks for use in value.uses()]:
        if (kept := node.inputs[KEPT]) is not None:
            node.outputs[0].replace_all_uses_with(kept, replace_graph_outputs=True)
    remove_unused(plain)
    remove_unused_inputs(plain, [*own, *blanks])
    remove_unused(plain)
    return plain


def _hide_later_tokens(attention: ir.Node, window: int | None) -> None:
    """Let attention itself hide later tokens, and those before a window if there is one, instead of by its mask."""
    attention.replace_input_with(BIAS, None)
    attention.attributes["causal"] = ir.AttrInt64("causal", 1)
    if window is not None:
        attention.attributes["local_window_size"] = ir.AttrInt64("local_window_size", window)
    # A token sees at least itself, so no row is NaN for lack of keys.
    if (zeroed := without_nan(attention.outputs[0])) is not None:
        zeroed.replace_all_uses_with(attention.outputs[0], replace_graph_outputs=True)


def write_preamble(preamble: Preamble | None, ranks: Sequence[m.Rank], writer: PackageWriter) -> list[m.Rank]:
    """Write the preamble, if there is one, and its variant without masks, if requests may leave masks out.

    Returns the ranks. They lose their engines' variants without masks if any engine that takes a mask has none.
    """
    if preamble is None:
        return list(ranks)
    left_out = [*preamble.masks, *preamble.blanks]
    ranks = _with_forms(ranks, left_out)
    graphs = {writer.folder / PREAMBLE: preamble.model.graph}
    if preamble.plain is not None and have_forms(ranks):
        graphs[writer.folder / PLAIN_PREAMBLE] = without_outputs(preamble.model, left_out).graph
    write_model_files(graphs, preamble.model, writer)
    return ranks


def _with_forms(ranks: Sequence[m.Rank], masks: Collection[str]) -> list[m.Rank]:
    engines = (engine for rank in ranks for engine in rank.engines if not set(masks).isdisjoint(engine.inputs))
    if all(engine.unmasked is not None for engine in engines):
        return list(ranks)
    plain = [[replace(engine, unmasked=None) for engine in rank.engines] for rank in ranks]
    return [replace(rank, engines=engines) for rank, engines in zip(ranks, plain, strict=True)]


def have_forms(ranks: Sequence[m.Rank]) -> bool:
    """Whether requests may leave masks out: engines have variants without masks."""
    return any(engine.unmasked is not None for rank in ranks for engine in rank.engines)
