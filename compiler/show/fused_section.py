"""The result of fusion for a model's attention, caches and norms, in words and on a plan's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from splitc.compiler.fusion.fuse import Fate
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
    "slices": "slices concatenated",
}


def by_kind(fates: Sequence[Fate]) -> Iterator[tuple[str, list[Fate]]]:
    """The fates of each kind (attention, caches and so on) that the model has, with a title."""
    for kind, title in TITLES.items():
        if chosen := [fate for fate in fates if fate.kind == kind]:
            yield title, chosen


def reasons_not_fused(fates: Sequence[Fate]) -> list[tuple[str, int]]:
    """The reasons why places were not fused, with their counts, most frequent first."""
    return Counter(fate.why for fate in fates if fate.why is not None).most_common()


def fused_in_words(title: str, fates: Sequence[Fate]) -> str:
    """The number of these places that became one operator."""
    return f"{title}: {sum(fate.operator is not None for fate in fates)} of {len(fates)}"


def fused_section(fates: Sequence[Fate]) -> Section | None:
    """How many attentions, norms and so on became one operator, and why the others did not.

    None if there are no such places.
    """
    if not fates:
        return None
    reasons = [(str(count), why) for why, count in reasons_not_fused(fates)]
    rows = [(fate.place, fate.operator or "not fused", fate.why or "") for fate in fates]
    tables = [Table("Why not", ("places", "reason"), reasons, ("places",), folded=False)] if reasons else []
    tables.append(Table("Each of them", ("place", "operator", "reason"), rows))
    return Section("Fusion", [fused_in_words(*kind) for kind in by_kind(fates)], tables=tables)
