"""What became of a model's attention, on a plan's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from splitc.compiler.fusion.fuse import Fate
from splitc.runtime.reports.contents import Section, Table


def reasons_not_fused(fates: Sequence[Fate]) -> list[tuple[str, int]]:
    """Why attention was not fused, and how much of it, the most frequent reason first."""
    return Counter(fate.why for fate in fates if fate.why is not None).most_common()


def fused_in_words(fates: Sequence[Fate]) -> str:
    """How much of the attention became one operator."""
    return f"attention fused: {sum(fate.operator is not None for fate in fates)} of {len(fates)}"


def fused_section(fates: Sequence[Fate]) -> Section | None:
    """How much of the attention became one operator, and why the rest did not. None if no attention was looked for."""
    if not fates:
        return None
    reasons = [(str(count), why) for why, count in reasons_not_fused(fates)]
    rows = [(fate.softmax, fate.operator or "not fused", fate.why or "") for fate in fates]
    tables = [Table("Why not", ("attentions", "reason"), reasons, ("attentions",), folded=False)] if reasons else []
    tables.append(Table("Each of them", ("softmax", "operator", "reason"), rows))
    return Section("Fusion", [fused_in_words(fates)], tables=tables)
