"""Where a package's collectives run: inside its engines or between them, and why."""

from __future__ import annotations

from splitc.runtime.engines import operator_library
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.package.manifest import Manifest


def describe_collectives(manifest: Manifest) -> str | None:
    """A sentence for the user; None for a package without collectives."""
    if any(engine.group for rank in manifest.ranks for engine in rank.engines):
        return "each rank is one engine, with its collectives inside"
    if not manifest.collectives:
        return None
    most = max(len(rank.engines) for rank in manifest.ranks)
    text = f"each rank is up to {most} engines, with its collectives between them"
    if find_kind(manifest.engine).uses_operators and not operator_library.is_built():
        text += (
            ", which is slower: splitc was installed without its C library (install a C compiler, then splitc again, "
            "then compile again)"
        )
    return text
