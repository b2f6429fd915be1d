"""Adds an input that chooses the tokens whose logits are computed. To generate, those of the last one are enough.

Exported decoders compute the logits of all tokens of a prompt: for 512 tokens and 128,000 columns that is 262 MB
in single precision, and often a tenth of the work. The input has the indices of the tokens, as `logits_to_keep` of
transformers' models, and a Gather before the last product selects their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.nodes import name_of, unused_name
from splitc.compiler.normal_form.graph import Graph, complete
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import operator_of, relate_axes
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.sizes import Axis, Sizes
from splitc.compiler.patterns.writing import Writer
from splitc.compiler.sizes.roles import find_roles
from splitc.compiler.states.own_sizes import exists_for_its_size
from splitc.runtime.package.states import KeptRows

# The name of the input; with primes behind it if the model has that name.
NAME = "logits_to_keep"
# Added to the probe size, so that the number of kept rows differs from other sizes.
APART = 2003


@dataclass(frozen=True)
class Chosen:
    """The manifest's `entry`, and the shapes of the model's outputs before they had the chosen rows only, by name."""

    entry: KeptRows
    declared: dict[str, ir.Shape | None]


@dataclass(frozen=True)
class _Cut:
    """Where rows are selected: the product's `node`, the `number` of its input, and the axis of its rows there.

    `after` are the values from the product's result to the output, each with the place of its axis of rows.
    """

    node: ir.Node
    number: int
    axis: int
    after: tuple[tuple[ir.Value, int], ...]


@dataclass(frozen=True)
class Tokens:
    """The `inputs` that may have an axis of tokens, and the `columns` that logits may have; any if it is None."""

    inputs: Sequence[ir.Value]
    columns: frozenset[int] | None = None

    def may_be_logits(self, output: ir.Value, size: int) -> bool:
        """Whether an output with this many columns may be logits."""
        return self.columns is None or size in self.columns or "logits" in (output.name or "").lower()


def find_tokens(context: Context) -> Tokens:
    """The tokens of a language model.

    With states, all other inputs may have them. Without, the model takes ids, and its logits have a column for each row
    of the table of ids, or are named so: other wide outputs may be the caches of a model that reads a prompt.
    """
    if context.states:
        inputs = context.graph.graph.inputs
        return Tokens([v for v in inputs if v.name not in context.pasts and not exists_for_its_size(v)])
    ids = {value: role.rows for value, role in find_roles(context.graph).items() if role.kind == "indices"}
    return Tokens(list(ids), frozenset(ids.values()))


def keep_rows(context: Context) -> tuple[Chosen | None, list[tuple[str, str | None]]]:
    """Let requests choose the rows of a language model's logits. The graph is changed in place.

    Logits are outputs of three axes with a row for each token, which a product with a weight makes wider than its
    input: a vocabulary is larger than a hidden state. Also returns the place of each output that has such rows, and why
    they can't be chosen (None if they can).
    """
    tokens = find_tokens(context)
    if not tokens.inputs:
        return None, []
    graph, sizes = replace(context.graph, reads=complete(context.graph.model)), context.sizes
    cuts: dict[ir.Value, list[_Cut]] = {}
    places: list[tuple[str, str | None]] = []
    own = {state.output for state in context.states}
    read: tuple[ir.Value, int] | None = None
    for output in graph.graph.outputs if sizes.differ else []:
        source = None if output.name in own else _tokens_of(output, tokens, sizes)
        node = output.producer()
        if source is None or node is None or (read is not None and source != read):
            continue
        try:
            selected = _find_cuts(graph, output, 1, sizes)
        except NotFusedError as error:
            places.append((name_of(node), str(error)))
            continue
        if selected:
            cuts[output], read = selected, source
            places.append((name_of(selected[0].node), None))
    if read is None:
        return None, places
    declared = {output.name or "": output.shape for output in cuts}
    rows, kept = _add_input(graph.graph, sizes.known(read[0], "its tokens")[read[1]], sizes)
    for cut in chain.from_iterable(cuts.values()):
        _select(cut, rows, kept, context.editor, sizes)
    outputs = {output.name or "": cut.after[0][1] for output, (cut, *_) in cuts.items()}
    return Chosen(KeptRows(rows.name or "", outputs, (read[0].name or "", read[1])), declared), places


def _tokens_of(output: ir.Value, tokens: Tokens, sizes: Sizes) -> tuple[ir.Value, int] | None:
    """The input, and its axis, with the size of the rows of an output that may be logits; None if there is none.

    The first axis of several is the batch. One with the same symbol is preferred: an encoder's length may be planned
    equal to a decoder's.
    """
    own = sizes.axes(output) or ()
    if len(own) != 3 or own[1].fixed is not None or not tokens.may_be_logits(output, own[2].size[0]):
        return None
    axes = {value: sizes.axes(value) or () for value in tokens.inputs}
    places = [(value, place) for value, of in axes.items() for place in range(len(of)) if place or len(of) == 1]
    same = [(value, place) for value, place in places if axes[value][place].size == own[1].size]
    return min(same, key=lambda one: not axes[one[0]][one[1]].is_same(own[1]), default=None)


def _find_cuts(
    graph: Graph, value: ir.Value, axis: int, sizes: Sizes, after: tuple[tuple[ir.Value, int], ...] = ()
) -> list[_Cut]:
    """The last product with a weight before a value with this axis of rows; several where their results are added.

    So are those of a layer and of its slot for adapters. No cut if one is missing, or no wider than its input. `after`
    are the values from there to the output. Raises NotFusedError if rows are not computed independently.
    """
    while (node := value.producer()) is not None:
        if len(node.outputs) != 1 or (after and (len(value.uses()) != 1 or value.is_graph_output())):
            raise NotFusedError("its rows are read by other nodes too")
        after = (*after, (value, axis))
        sources = _sources(node, axis, sizes)
        if len(sources) > 1:
            terms = [_find_cuts(graph, source, place, sizes, after) for _, source, place in sources]
            return [cut for term in terms for cut in term] if all(terms) else []
        ((number, source, axis),) = sources
        others = (other for n, other in enumerate(node.inputs) if other is not None and n != number)
        if operator_of(node).is_product and any(graph.is_constant(other) for other in others):
            narrow, wide = (math.prod(size for size, _ in sizes.of(one) or ()) for one in (source, value))
            return [_Cut(node, number, axis, after)] if wide > narrow else []
        value = source
    return []


def _sources(node: ir.Node, axis: int, sizes: Sizes) -> list[tuple[int, ir.Value, int]]:
    """The inputs, by number, and their axes, whose rows a node turns into the rows of its output, each by itself.

    This is known if the axis could be sharded without communication. Raises NotFusedError if it can't.
    """
    known = {value: sizes.of(value) for value in (*node.inputs, *node.outputs) if value is not None}
    if None in known.values():
        raise NotFusedError("the sizes of a value that it is computed from are not known")
    inputs, outputs = (
        [None if value is None else tuple(ax.new_axis(probe) for _, probe in known[value] or ()) for value in values]
        for values in (node.inputs, node.outputs)
    )
    operation = Operation(node, inputs, outputs, [None] * len(inputs))
    relate_axes(operation)
    rows = ax.leaves(operation.output()[axis])
    read = (one for sizes_read in (*operation.sizes.values(), *operation.attributes.values()) for one in sizes_read)
    needed = [leaf for one in (operation.contracted, operation.reduced, *read) for leaf in ax.leaves(one or ())]
    sources = [
        (number, value, place)
        for number, (value, axes) in enumerate(zip(node.inputs, operation.inputs, strict=True))
        for place, own in enumerate(axes or ())
        if value is not None and ax.leaves(own) == rows
    ]
    if not sources or len(rows) != 1 or rows[0].pinned or rows[0] in needed:
        raise NotFusedError(f"{name_of(node)} does not compute its rows independently")
    return sources


def _add_input(graph: ir.Graph, tokens: Axis, sizes: Sizes) -> tuple[ir.Value, Axis]:
    """The input for the indices of rows, and its axis. Where sizes are planned, all rows are kept."""
    name = unused_name(NAME, sizes.shapes)
    rows = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(rows)
    planned, probe = tokens.size
    # onnx_ir parses symbols as expressions, which can't contain a prime.
    kept = Axis((planned, probe + APART), ir.SymbolicDim(name.replace("'", "_")))
    sizes.put(rows, [kept])
    return rows, kept


def _select(cut: _Cut, rows: ir.Value, kept: Axis, editor: Editor, sizes: Sizes) -> None:
    """Select rows before a product, and set the sizes of all values after it."""
    source = cut.node.inputs[cut.number]
    assert source is not None
    work = Writer(cut.node, cut.after[-1][0].name or "", (), editor, sizes)
    own = list(work.axes(source))
    own[cut.axis] = kept
    cut.node.replace_input_with(cut.number, work.add("kept", "Gather", [source, rows], source, own, axis=cut.axis))
    for value, place in cut.after:
        after = list(work.axes(value))
        after[place] = kept
        sizes.put(value, after)
