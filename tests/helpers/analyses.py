"""A cache of the analyses of models that all tests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitc.compiler.analysis.facts import Analysis, analyze
from splitc.compiler.request.shapes import AskedShapes


@dataclass
class KeptAnalyses:
    """Analyses of the `models`, by the arguments of `analyze`. Neither these models nor their analyses may be changed.

    While it `pauses`, for tests that patch something, nothing is cached, and the cache is not used.
    """

    models: set[Path] = field(default_factory=set)
    pauses: bool = False
    _known: dict[str, Analysis] = field(default_factory=dict)

    def analyze(
        self,
        path: Path,
        asked: AskedShapes,
        blocks: int,
        settings: Mapping[str, Any],
        *others: Any,
    ) -> Analysis:
        """As `splitc.compiler.analysis.facts.analyze`."""
        trusts, states, gains, adapters, *rest = others
        if self.pauses or path not in self.models or settings or adapters:
            return analyze(path, asked, blocks, settings, *others)
        key = repr((path, asked, blocks, trusts, states, gains, rest))
        if key not in self._known:
            self._known[key] = analyze(path, asked, blocks, settings, *others)
        return self._known[key]
