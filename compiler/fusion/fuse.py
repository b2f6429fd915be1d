"""Fuses decomposed attention, norms and rotary embeddings, for engines that do not fuse them by themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.attention.attention import Attention, find_attentions
from splitc.compiler.attention.blanks import with_blanks
from splitc.compiler.attention.multi_head import OPERATOR, write_multi_head_attention
from splitc.compiler.attention.operator import MULTI_HEAD, is_operator, read_operator
from splitc.compiler.attention.softmax import find_softmax
from splitc.compiler.caches.adopted import adopt, find_adopted, pasts_of
from splitc.compiler.caches.cache import ROWS, Caches, check_scores, find_caches, growing_caches, unfused_caches
from splitc.compiler.caches.grouped import OPERATOR as GROUPED
from splitc.compiler.caches.grouped import is_known, write_group_query_attention
from splitc.compiler.caches.latent import OPERATOR as LATENT
from splitc.compiler.caches.latent import LatentAttention, find_latent, write_latent
from splitc.compiler.caches.latent_cache import OPERATOR as CACHED_LATENT
from splitc.compiler.caches.latent_cache import find_latent_caches
from splitc.compiler.caches.lengths import Lengths
from splitc.compiler.caches.preamble import Preamble, cut_preamble
from splitc.compiler.caches.scattered import fuse_scattered
from splitc.compiler.fusion.assembled import OPERATOR as ASSEMBLED
from splitc.compiler.fusion.assembled import fuse_assembled
from splitc.compiler.fusion.divided import fuse_divided
from splitc.compiler.fusion.experts import OPERATOR as EXPERTS
from splitc.compiler.fusion.experts import mark_experts
from splitc.compiler.fusion.kept_rows import Chosen, keep_rows
from splitc.compiler.fusion.modulation import fuse_modulation
from splitc.compiler.fusion.norm import fuse_norm, move_transpose, narrow_norm
from splitc.compiler.fusion.rotary_embedding import OPERATOR as ROTARY
from splitc.compiler.fusion.rotary_embedding import fuse_rotary, move_rotary
from splitc.compiler.fusion.split_norms import fuse_split_norms
from splitc.compiler.fusion.views import join_views
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import VIEWS, source_through
from splitc.compiler.graphs.reads import all_nodes, has_subgraphs
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.inference.shapes import BoundShapes, bind_shapes
from splitc.compiler.nodes import MICROSOFT, name_of, operator_name
from splitc.compiler.normal_form.graph import Graph, complete
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.kernels import ON_GPUS, SINGLES, Gains, check_type
from splitc.compiler.patterns.sizes import known_shapes
from splitc.compiler.patterns.writing import Writer
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.roles import find_roles
from splitc.runtime.package.manifest import Role
from splitc.runtime.package.states import Length, State


@dataclass(frozen=True)
class Outcome:
    """What became of one subgraph that looks like a pattern: the `operator` that replaces it, or `why` nothing does.

    `kind` is the kind of pattern: attention, a cache, a norm, a rotary embedding, a product that is split, and so on.
    `place` is the name of its Softmax, mean, norm or last node.
    """

    place: str
    operator: str | None
    why: str | None = None
    kind: str = "attention"


@dataclass(frozen=True)
class Fused:
    """A graph after fusion.

    - `bound`: the shapes of all its values.
    - `outcomes`: what became of each subgraph that looks like a pattern.
    - `lengths`: inputs that fusion added, for the lengths of caches. The `preamble` computes further added inputs.
    - `chosen`: an added input by which requests choose the tokens whose logits are computed.
    - `uncompared`: symbols of dynamic sizes that inputs must agree on. The nodes that would have failed on unequal
      sizes were fused, and the fused operator does not check them.
    """

    graph: Graph
    bound: BoundShapes
    outcomes: tuple[Outcome, ...]
    lengths: tuple[Length, ...] = ()
    preamble: Preamble | None = None
    uncompared: frozenset[str] = frozenset()
    chosen: Chosen | None = None


def fuse(
    graph: Graph,
    shapes: Mapping[str, Shape],
    bound: BoundShapes,
    gains: Gains = ON_GPUS,
    states: Sequence[State] = (),
) -> Fused:
    """Fuse norms, rotary embeddings and attention, with its caches among the `states`, where the result is faster.

    The graph is changed in place. `bound` are the shapes of its values for inputs of these `shapes`.
    """
    context = Context(graph, shapes, bound, gains, tuple(states), known_shapes(bound), Editor(graph.graph))
    roles = {value.name or "": role for value, role in find_roles(graph).items()} if gains.has_room and states else {}
    work = _Attentions(context)
    outcomes = _fuse_nodes(work)
    lengths = work.lengths.entries() if work.caches or work.adopted else ()
    if any(outcome.operator in (OPERATOR, GROUPED, ROTARY, LATENT) for outcome in outcomes):
        graph.model.opset_imports.setdefault(MICROSOFT, 1)
    preamble = None
    if any(outcome.operator for outcome in outcomes):
        join_views(context.editor, context.sizes)
        complete(graph.model)
        if lengths and gains.has_room:
            preamble, outcome = work.preamble(roles, lengths[0].input)
            outcomes.append(outcome)
    chosen, places = keep_rows(context)
    outcomes += [Outcome(place, "Gather" if why is None else None, why, "rows") for place, why in places]
    outcomes += [
        Outcome(place, EXPERTS if why is None else None, why, "experts") for place, why in mark_experts(context)
    ]
    if not any(outcome.operator for outcome in outcomes):
        return Fused(graph, bound, tuple(outcomes))
    bound = replace(bound, shapes={**bound.shapes, **context.planned})
    is_rotary = any(outcome.operator == ROTARY for outcome in outcomes)
    uncompared = frozenset(context.tables.uncompared if is_rotary else ())
    graph = replace(graph, reads=complete(graph.model))
    return Fused(graph, bound, tuple(outcomes), lengths, preamble, uncompared, chosen)


def _fuse_nodes(work: _Attentions) -> list[Outcome]:
    """Fuse the patterns that lie around single nodes."""
    context = work.context
    nodes = [node for node in context.graph.nodes if node.graph is not None]
    # Attention comes last: norms and rotary embeddings of its queries and keys are single operators by then.
    parts = {node: outcome for node in nodes if work.gains.parts and (outcome := _part(node, context)) is not None}
    if any(outcome.operator in (ASSEMBLED, ROTARY) for outcome in parts.values()):
        remove_unused(context.graph.graph)  # so that replaced ScatterND nodes no longer count as readers
    nodes = [node for node in nodes if node in parts or node.graph is not None]
    outcomes = [outcome for node in nodes for outcome in ([parts[node]] if node in parts else work.attention(node))]
    adopted, has_caches = list(work.adopt()), any(outcome.kind == "cache" for outcome in outcomes)
    return [*outcomes, *adopted, *work.unfused_caches(has_caches), *_looks_inside(context)]


# What fuses a pattern other than attention at a node: its kind, and a function that returns the operator that replaces
# it, or None if the node is not of that pattern. It raises NotFusedError if the pattern is there and can't be fused.
PARTS: tuple[tuple[str, Callable[[ir.Node, Context], str | None]], ...] = (
    ("norm", fuse_norm),
    ("norm", fuse_split_norms),
    ("norm", move_transpose),
    ("modulation", fuse_modulation),
    ("norm", narrow_norm),
    ("rotary", fuse_rotary),
    ("rotary", move_rotary),
    ("product", fuse_divided),
    ("cache", fuse_scattered),
    ("slices", fuse_assembled),
)


def _part(node: ir.Node, context: Context) -> Outcome | None:
    """Fuse a pattern other than attention that begins or ends at a node; None if there is none."""
    place = name_of(node)
    for kind, attempt in PARTS:
        try:
            if (operator := attempt(node, context)) is not None:
                return Outcome(place, operator, None, "rotary" if operator == ROTARY else kind)
        except NotFusedError as error:
            return Outcome(place, None, str(error), kind)
    return None


@dataclass(frozen=True)
class _Attentions:
    """Fuses attentions and their caches where that is faster.

    `latents` are the caches of multi-head latent attention that are not in place, each with the reason.
    """

    context: Context
    latents: dict[str, str] = field(default_factory=dict)

    @property
    def gains(self) -> Gains:
        return self.context.gains

    @cached_property
    def grown(self) -> Caches:
        """The caches that grow by a Concat. First read when norms and rotary embeddings of new keys are fused."""
        return growing_caches(self.context.graph.graph, self.context.states) if self.gains.caches else {}

    @cached_property
    def caches(self) -> Caches:
        """The growing caches that an operator may keep in place: those with an axis of heads."""
        return {present: own for present, own in self.grown.items() if present.shape and len(present.shape) > ROWS + 1}

    @cached_property
    def adopted(self) -> Sequence[ir.Node]:
        """The model's own attentions that get the lengths of their caches."""
        return find_adopted(self.context.graph.graph, self.context.states) if self.gains.has_room else ()

    @cached_property
    def lengths(self) -> Lengths:
        """The inputs whose sizes are the lengths of caches."""
        pasts = [*(past for past, _ in self.caches.values()), *pasts_of(self.adopted)]
        return Lengths(self.context, pasts)

    def preamble(self, roles: Mapping[str, Role], place: str) -> tuple[Preamble | None, Outcome]:
        """Cut off the graph that the session computes before the ranks. None if that is impossible."""
        try:
            made = cut_preamble(self.context, self.lengths, roles)
        except NotFusedError as error:
            return None, Outcome(place, None, str(error), "preamble")
        return made, Outcome(place, "preamble", None, "preamble")

    def attention(self, node: ir.Node) -> Iterator[Outcome]:
        """Fuse the attention around a Softmax, and its caches, or replace attention that is one operator.

        Yields nothing for other nodes, nor for an operator without caches that stays as it is.
        """
        if is_operator(node):
            yield from self._operator(node)
            return
        for name, attention in _decomposed_attentions(node, self.context):
            if isinstance(attention, NotFusedError):
                yield Outcome(name, None, str(attention), "attention" if self.gains.attention else "cache")
            else:
                yield from self._replaced(name, attention)

    def _operator(self, node: ir.Node) -> list[Outcome]:
        """Replace attention that is one operator by another one, with its caches, where that is faster."""
        is_fused = operator_name(node) == MULTI_HEAD
        if not self.caches and (is_fused or not self.gains.attention):
            return []
        place = name_of(node)
        work = Writer(node, node.outputs[0].name or place, (), self.context.editor, self.context.sizes)
        try:
            outcomes = list(self._replaced(place, read_operator(node, work), is_fused))
        except NotFusedError as error:
            outcomes = [Outcome(place, None, str(error), "cache")] if self.caches else []
        if not any(outcome.operator for outcome in outcomes):
            work.undo()
        return [outcome for outcome in outcomes if outcome.operator or outcome.kind == "cache"]

    def _replaced(self, place: str, attention: Attention, is_fused: bool = False) -> Iterator[Outcome]:
        """Fuse an attention: on its latent (multi-head latent attention), else with its caches, else alone.

        `is_fused`: alone it is one operator already.
        """
        attention = with_blanks(attention, self.context.sizes)
        on_latent = self._on_latent(place, attention)
        yield from on_latent
        if any(outcome.operator for outcome in on_latent):
            return
        cached = self._with_caches(place, attention) if self.caches else None
        if cached is not None:
            yield cached
        if self.gains.attention and not is_fused and (cached is None or cached.operator is None):
            yield self._alone(place, attention)

    def _on_latent(self, place: str, attention: Attention) -> list[Outcome]:
        """Fuse an attention whose keys and values are projected from a cached latent; no outcomes for any other."""
        latent = find_latent(attention, self.grown, self.context.sizes) if self.grown else None
        query = self.context.shape_of(attention.query.value)
        if latent is None or query is None:
            return []
        try:
            check_type(latent.latent, HALVES | SINGLES)
            why = self._write_latent(latent, query[attention.query.axes[-2]])
        except NotFusedError as error:
            return [Outcome(place, None, str(error), "latent")]
        own = Outcome(place, LATENT, None, "latent")
        if why is None:
            return [own, Outcome(place, CACHED_LATENT, None, "cache")]
        read = {source_through(value, *VIEWS) for value in (latent.latent, *latent.shared)}
        self.latents.update({past.name or "": why for present, (past, _) in self.grown.items() if present in read})
        return [own]

    def _write_latent(self, latent: LatentAttention, new: int) -> str | None:
        """Compute an attention on its latent, for `new` tokens a request.

        Returns why its caches are not in place; None if they are. Raises NotFusedError if it stays as it is.
        """
        why = "engines for CPU devices concatenate caches of latents"
        if self.gains.has_room and (new <= self.gains.most_absorbed or latent.gains(new)):
            try:
                check_scores(latent.attention)
                kept = find_latent_caches(latent.latent, latent.shared, self.caches, self.lengths, self.context.editor)
                write_latent(latent, self.context, kept)
                return None
            except NotFusedError as error:
                why = str(error)
        if not latent.gains(new):
            raise NotFusedError(
                "with this many tokens a request, projecting keys and values from its latent takes fewer operations"
            )
        write_latent(latent, self.context)
        return why

    def adopt(self) -> Iterator[Outcome]:
        """Give the model's own attentions the lengths of their caches."""
        if not self.adopted:
            return
        # Probes keep only those constants that are the same for all sizes.
        model, other = self.context.graph.model, self.context.other_sizes.shapes
        inputs = {value.name or "": other[value.name or ""] for value in model.graph.inputs}
        constants = (self.context.bound.constants, bind_shapes(model, inputs).constants)
        for node in self.adopted:
            try:
                check_type(node.outputs[0], self.gains.caches)
                adopt(node, self.lengths, self.context.sizes, constants)
                yield Outcome(name_of(node), GROUPED, None, "cache")
            except NotFusedError as error:
                yield Outcome(name_of(node), None, str(error), "cache")

    def _with_caches(self, place: str, attention: Attention) -> Outcome | None:
        """Fuse an attention with its caches; None if it has none."""
        try:
            cached = find_caches(attention, self.caches, self.context.shape_of)
            if cached is None:
                return None
            check_type(attention.query.value, self.gains.caches)
            at = attention.output.producer()
            if attention.softcap and not self.gains.capped and at is not None and not is_operator(at):
                raise NotFusedError("no kernel is faster with a softcap (Tanh)")
            if not is_known():
                raise NotFusedError(f"the installed ONNX Runtime has no {GROUPED}: install a newer one")
            write_group_query_attention(cached, self.lengths, self.context)
        except NotFusedError as error:
            return Outcome(place, None, str(error), "cache")
        return Outcome(place, GROUPED, None, "cache")

    def _alone(self, place: str, attention: Attention) -> Outcome:
        """Fuse an attention without its caches."""
        gains, shape = self.gains, self.context.shape_of(attention.layouts[0])
        try:
            check_type(attention.query.value, gains.attention)
            if shape is None or math.prod(shape[-2:]) < gains.least_scores or shape[-1] < gains.least_keys:
                raise NotFusedError("its scores (queries x keys) are too few for one operator to be faster")
            if (attention.biases or attention.is_causal) and not gains.biased:
                raise NotFusedError("no kernel is faster with a mask or a bias")
            write_multi_head_attention(attention, self.context)
        except NotFusedError as error:
            return Outcome(place, None, str(error))
        return Outcome(place, OPERATOR)

    def unfused_caches(self, is_read: bool) -> list[Outcome]:
        """The caches that can't be written in place, with reasons. `is_read`: some attention reads a cache."""
        if not self.gains.caches:
            return []
        reasons = unfused_caches(self.context.graph.graph, self.context.states, self.caches, is_read, self.latents)
        adopted = {past.name for past in pasts_of(self.adopted)}  # each has an outcome of its own
        return [Outcome(past, None, why, "cache") for past, why in reasons if past not in adopted]


def _looks_inside(context: Context) -> Iterator[Outcome]:
    """Subgraphs that look like attention inside an If or a Loop. They stay: shapes are not known there."""
    graph = context.graph.graph
    if context.gains.attention and has_subgraphs(graph):
        inside = (node for node in all_nodes(graph) if node.graph is not graph)
        for name, _ in (one for node in inside for one in _decomposed_attentions(node, context)):
            yield Outcome(name, None, "it is inside an If or a Loop")


def _decomposed_attentions(node: ir.Node, context: Context) -> list[tuple[str, Attention | NotFusedError]]:
    """The attentions of a Softmax, each with its name, or why its form is unknown; none of a node of another kind."""
    softmax = find_softmax(node, context.rank_of, context.graph.model.opset_imports.get("", 1))
    if softmax is None:
        return []
    try:
        return [(softmax.name, attention) for attention in find_attentions(softmax, context.rank_of)]
    except NotFusedError as error:
        return [(softmax.name, error)]
