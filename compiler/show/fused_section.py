"""The result of fusion for a model's attention, caches and norms, in words and on a plan's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from splitc.compiler.fusion.fuse import Outcome
from splitc.runtime.reports.contents import Section, Table

TITLES = {
    "attention": "attention fused",
    "latent": "attention computed on latents",
    "cache": "caches in place",
    "preamble": "masks and lengths computed before the ranks",
    "norm": "norms fused",
    "modulation": "modulated norms fused",
    "product": "products split into parts",
    "rotary": "rotary embeddings fused",
    "experts": "mixtures of experts fused",
    "slices": "slices concatenated",
    "rows": "logits of chosen tokens alone",
}


def by_kind(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """The outcomes of each kind (attention, caches and so on) that the model has, with a title."""
    for kind, title in TITLES.items():
        if chosen := [outcome for outcome in outcomes if outcome.kind == kind]:
            yield title, chosen


def reasons_not_fused(outcomes: Sequence[Outcome]) -> list[tuple[str, int]]:
    """The reasons why places were not fused, with their counts, most frequent first."""
    return Counter(outcome.why for outcome in outcomes if outcome.why is not None).most_common()


def fused_in_words(title: str, outcomes: Sequence[Outcome]) -> str:
    """The number of these places that became one operator."""
    return f"{title}: {sum(outcome.operator is not None for outcome in outcomes)} of {len(outcomes)}"


def fused_section(outcomes: Sequence[Outcome]) -> Section | None:
    """How many attentions, norms and so on became one operator, and why the others did not.

    None if there are no such places.
    """
    if not outcomes:
        return None
    reasons = [(str(count), why) for why, count in reasons_not_fused(outcomes)]
    rows = [(outcome.place, outcome.operator or "not fused", outcome.why or "") for outcome in outcomes]
    tables = [Table("Why not", ("places", "reason"), reasons, ("places",), folded=False)] if reasons else []
    tables.append(Table("Each of them", ("place", "operator", "reason"), rows))
    return Section("Fusion", [fused_in_words(*kind) for kind in by_kind(outcomes)], tables=tables)
