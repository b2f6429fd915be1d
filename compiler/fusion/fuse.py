"""Fuses decomposed attention, norms and rotary embeddings, for engines that do not fuse them by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph, complete
from splitc.compiler.frontend.matching import source_through
from splitc.compiler.frontend.probe_sizes import Probes
from splitc.compiler.frontend.reads import all_nodes, has_subgraphs
from splitc.compiler.frontend.roles import find_roles
from splitc.compiler.frontend.shapes import BoundShapes, bind_shapes
from splitc.compiler.frontend.unused import remove_unused
from splitc.compiler.fusion.adopted import Adopted, adopt, find_adopted
from splitc.compiler.fusion.assembled import OPERATOR as ASSEMBLED
from splitc.compiler.fusion.attention import Attention, find_attention
from splitc.compiler.fusion.attention_operator import MULTI_HEAD, is_operator, read_operator
from splitc.compiler.fusion.blanks import with_blanks
from splitc.compiler.fusion.cache import ROWS, Caches, check_scores, find_caches, growing_caches, unfused_caches
from splitc.compiler.fusion.errors import NotFusedError
from splitc.compiler.fusion.experts import OPERATOR as EXPERTS
from splitc.compiler.fusion.experts import mark_experts
from splitc.compiler.fusion.grouped import OPERATOR as GROUPED
from splitc.compiler.fusion.grouped import is_known, write_group_query_attention
from splitc.compiler.fusion.kept_rows import Chosen, find_tokens, keep_rows
from splitc.compiler.fusion.kernels import ON_GPUS, SINGLES, Gains, check_type
from splitc.compiler.fusion.latent import OPERATOR as LATENT
from splitc.compiler.fusion.latent import LatentAttention, find_latent, write_latent
from splitc.compiler.fusion.latent_cache import OPERATOR as CACHED_LATENT
from splitc.compiler.fusion.latent_cache import find_latent_caches
from splitc.compiler.fusion.lengths import Lengths
from splitc.compiler.fusion.multi_head import DOMAIN, OPERATOR, write_multi_head_attention
from splitc.compiler.fusion.operand import VIEWS
from splitc.compiler.fusion.parts import Parts
from splitc.compiler.fusion.preamble import Preamble, cut_preamble
from splitc.compiler.fusion.rotary_embedding import OPERATOR as ROTARY
from splitc.compiler.fusion.sizes import Sizes, known_shapes
from splitc.compiler.fusion.softmax import find_softmax
from splitc.compiler.fusion.tables import Tables
from splitc.compiler.fusion.views import join_views
from splitc.compiler.fusion.writing import Writer
from splitc.compiler.nodes import name_of, operator_name
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.request.shapes import Shape
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
    roles = {value.name or "": role for value, role in find_roles(graph).items()} if gains.has_room and states else {}
    work = _Work(graph, shapes, bound, gains, tuple(states), known_shapes(bound), Editor(graph.graph))
    nodes = [node for node in graph.nodes if node.graph is not None]
    # Attention comes last: norms and rotary embeddings of its queries and keys are single operators by then.
    parts = {node: outcome for node in nodes if gains.parts and (outcome := work.part(node)) is not None}
    if any(outcome.operator in (ASSEMBLED, ROTARY) for outcome in parts.values()):
        remove_unused(graph.graph)  # so that replaced ScatterND nodes no longer count as readers
    nodes = [node for node in nodes if node in parts or node.graph is not None]
    outcomes = [outcome for node in nodes for outcome in ([parts[node]] if node in parts else work.attention(node))]
    outcomes += [
        *work.adopt(),
        *work.unfused_caches(any(outcome.kind == "cache" for outcome in outcomes)),
        *_looks_inside(graph, work),
    ]
    lengths = work.lengths.entries() if work.caches or work.adopted.nodes else ()
    if any(outcome.operator in (OPERATOR, GROUPED, ROTARY, LATENT) for outcome in outcomes):
        graph.model.opset_imports.setdefault(DOMAIN, 1)
    preamble = None
    if any(outcome.operator for outcome in outcomes):
        work.join_views()
        complete(graph.model)
        if lengths and gains.has_room:
            preamble, outcome = work.preamble(roles, lengths[0].input)
            outcomes.append(outcome)
    chosen, places = work.keep_rows()
    outcomes += [Outcome(place, "Gather" if why is None else None, why, "rows") for place, why in places]
    mixtures = mark_experts(graph.graph, gains.experts, lambda: work.other_sizes.shapes) if gains.experts else ()
    outcomes += [Outcome(place, EXPERTS if why is None else None, why, "experts") for place, why in mixtures]
    if not any(outcome.operator for outcome in outcomes):
        return Fused(graph, bound, tuple(outcomes))
    bound = replace(bound, shapes={**bound.shapes, **work.planned})
    uncompared = work.uncompared() if any(outcome.operator == ROTARY for outcome in outcomes) else frozenset()
    graph = replace(graph, reads=complete(graph.model))
    return Fused(graph, bound, tuple(outcomes), lengths, preamble, uncompared, chosen)


@dataclass(frozen=True)
class _Work:
    """Tries the patterns at each node of a graph, and fuses those that become faster.

    `planned` are the shapes of all values, including new ones. `latents` are the caches of multi-head latent attention
    that are not in place, each with the reason.
    """

    graph: Graph
    shapes: Mapping[str, Shape]
    bound: BoundShapes
    gains: Gains
    states: Sequence[State]
    planned: dict[str, Shape]
    editor: Editor
    latents: dict[str, str] = field(default_factory=dict)

    @cached_property
    def other_sizes(self) -> BoundShapes:
        """The shapes for probe sizes. Their inference takes long, so it waits until a pattern may be fused."""
        return Probes(self.graph, self.shapes, self.bound).different()

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self.planned, known_shapes(self.other_sizes), self.other_sizes is not self.bound)

    @cached_property
    def _tables(self) -> Tables:
        other = self.other_sizes
        return Tables(self.graph, known_shapes(other), {} if other is self.bound else other.constants)

    @cached_property
    def _parts(self) -> Parts:
        states = frozenset(state.input for state in self.states)
        return Parts(self.gains, states, self.editor, self._shape_of, lambda: self._sizes, lambda: self._tables)

    @cached_property
    def grown(self) -> Caches:
        """The caches that grow by a Concat. First read when norms and rotary embeddings of new keys are fused."""
        return growing_caches(self.graph.graph, self.states) if self.gains.caches else {}

    @cached_property
    def caches(self) -> Caches:
        """The growing caches that an operator may keep in place: those with an axis of heads."""
        return {present: own for present, own in self.grown.items() if present.shape and len(present.shape) > ROWS + 1}

    @cached_property
    def adopted(self) -> Adopted:
        """The model's own attentions that get the lengths of their caches."""
        return find_adopted(self.graph.graph, self.states) if self.gains.has_room else Adopted((), ())

    @cached_property
    def lengths(self) -> Lengths:
        """The inputs whose sizes are the lengths of caches."""
        pasts = [*(past for past, _ in self.caches.values()), *self.adopted.pasts]
        states = [state.input for state in self.states]
        return Lengths(self.editor, self._sizes, pasts, states, self.gains.has_room)

    def uncompared(self) -> frozenset[str]:
        """As `Fused.uncompared`: the operator RotaryEmbedding does not compare its data's size with its tables'."""
        return frozenset(self._tables.uncompared)

    def join_views(self) -> None:
        """Remove views of views."""
        join_views(self.editor, self._sizes)

    def keep_rows(self) -> tuple[Chosen | None, list[tuple[str, str | None]]]:
        """As `kept_rows.keep_rows`."""
        tokens = find_tokens(self.graph, self.states)
        if not tokens.inputs:
            return None, []
        graph = replace(self.graph, reads=complete(self.graph.model))
        return keep_rows(graph, self.editor, self._sizes, self.states, tokens)

    def preamble(self, roles: Mapping[str, Role], place: str) -> tuple[Preamble | None, Outcome]:
        """Cut off the graph that the session computes before the ranks. None if that is impossible."""
        states = [state.input for state in self.states]
        try:
            made = cut_preamble(self.graph.model, self.lengths, states, self._sizes, roles)
        except NotFusedError as error:
            return None, Outcome(place, None, str(error), "preamble")
        return made, Outcome(place, "preamble", None, "preamble")

    def part(self, node: ir.Node) -> Outcome | None:
        """Fuse a pattern other than attention that begins or ends at a node; None if there is none."""
        place = name_of(node)
        for kind, attempt in self._parts.attempts:
            try:
                if (operator := attempt(node)) is not None:
                    return Outcome(place, operator, None, "rotary" if operator == ROTARY else kind)
            except NotFusedError as error:
                return Outcome(place, None, str(error), kind)
        return None

    def attention(self, node: ir.Node) -> Iterator[Outcome]:
        """Fuse the attention around a Softmax, and its caches, or replace attention that is one operator.

        Yields nothing for other nodes, nor for an operator without caches that stays as it is.
        """
        if is_operator(node):
            yield from self._operator(node)
            return
        softmax = find_softmax(node, self._rank_of, self.graph.model.opset_imports.get("", 1))
        if softmax is None:
            return
        try:
            attention = find_attention(softmax, self._rank_of)
        except NotFusedError as error:
            yield Outcome(softmax.name, None, str(error), "attention" if self.gains.attention else "cache")
            return
        if attention is None:
            return
        yield from self._replaced(softmax.name, attention)

    def _operator(self, node: ir.Node) -> list[Outcome]:
        """Replace attention that is one operator by another one, with its caches, where that is faster."""
        is_fused = operator_name(node) == MULTI_HEAD
        if not self.caches and (is_fused or not self.gains.attention):
            return []
        place = name_of(node)
        work = Writer(node, node.outputs[0].name or place, (), self.editor, self._sizes)
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
        attention = with_blanks(attention, self._sizes)
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
        latent = find_latent(attention, self.grown, self._sizes) if self.grown else None
        query = self._shape_of(attention.query.value)
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
                kept = find_latent_caches(latent.latent, latent.shared, self.caches, self.lengths, self.editor)
                write_latent(latent, self.editor, self._sizes, kept)
                return None
            except NotFusedError as error:
                why = str(error)
        if not latent.gains(new):
            raise NotFusedError(
                "with this many tokens a request, projecting keys and values from its latent takes fewer operations"
            )
        write_latent(latent, self.editor, self._sizes)
        return why

    def adopt(self) -> Iterator[Outcome]:
        """Give the model's own attentions the lengths of their caches."""
        if not self.adopted.nodes:
            return
        # Probes keep only those constants that are the same for all sizes.
        inputs = {value.name or "": self.other_sizes.shapes[value.name or ""] for value in self.graph.graph.inputs}
        constants = (self.bound.constants, bind_shapes(self.graph.model, inputs).constants)
        for node in self.adopted.nodes:
            try:
                check_type(node.outputs[0], self.gains.caches)
                adopt(node, self.lengths, self._sizes, constants)
                yield Outcome(name_of(node), GROUPED, None, "cache")
            except NotFusedError as error:
                yield Outcome(name_of(node), None, str(error), "cache")

    def _with_caches(self, place: str, attention: Attention) -> Outcome | None:
        """Fuse an attention with its caches; None if it has none."""
        try:
            cached = find_caches(attention, self.caches, self._shape_of)
            if cached is None:
                return None
            check_type(attention.query.value, self.gains.caches)
            at = attention.output.producer()
            if attention.softcap and not self.gains.capped and at is not None and not is_operator(at):
                raise NotFusedError("no kernel is faster with a softcap (Tanh)")
            if not is_known():
                raise NotFusedError(f"the installed ONNX Runtime has no {GROUPED}: install a newer one")
            write_group_query_attention(cached, self.editor, self._sizes, self.lengths)
        except NotFusedError as error:
            return Outcome(place, None, str(error), "cache")
        return Outcome(place, GROUPED, None, "cache")

    def _alone(self, place: str, attention: Attention) -> Outcome:
        """Fuse an attention without its caches."""
        gains, shape = self.gains, self._shape_of(attention.layouts[0])
        try:
            check_type(attention.query.value, gains.attention)
            if shape is None or math.prod(shape[-2:]) < gains.least_scores or shape[-1] < gains.least_keys:
                raise NotFusedError("its scores (queries x keys) are too few for one operator to be faster")
            if (attention.biases or attention.is_causal) and not gains.biased:
                raise NotFusedError("no kernel is faster with a mask or a bias")
            write_multi_head_attention(attention, self.editor, self._sizes, gains.largest_head)
        except NotFusedError as error:
            return Outcome(place, None, str(error))
        return Outcome(place, OPERATOR)

    def unfused_caches(self, is_read: bool) -> list[Outcome]:
        """The caches that can't be written in place, with reasons. `is_read`: some attention reads a cache."""
        if not self.gains.caches:
            return []
        reasons = unfused_caches(self.graph.graph, self.states, self.caches, is_read, self.latents)
        adopted = {past.name for past in self.adopted.pasts}  # each has an outcome of its own
        return [Outcome(past, None, str(why), "cache") for past, why in reasons if past not in adopted]

    def _shape_of(self, value: ir.Value) -> Shape | None:
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return None if (value.name or "") in self.bound.uncertain else self.planned.get(value.name or "")

    def _rank_of(self, value: ir.Value) -> int | None:
        shape = self._shape_of(value)
        return None if shape is None else len(shape)


def _looks_inside(graph: Graph, work: _Work) -> list[Outcome]:
    """Subgraphs that look like attention inside an If or a Loop. They stay: shapes are not known there."""
    if not work.gains.attention or not has_subgraphs(graph.graph):
        return []
    unknown = replace(work, gains=Gains(frozenset({ir.DataType.UNDEFINED})))
    inside = (node for node in all_nodes(graph.graph) if node.graph is not graph.graph)
    outcomes = (outcome for node in inside for outcome in unknown.attention(node))
    return [replace(outcome, why="it is inside an If or a Loop") for outcome in outcomes]
