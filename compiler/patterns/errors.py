"""Why a pattern stays as it is."""

from __future__ import annotations

NO_SIZES = "the shapes of its queries, keys and values are not known"


class NotFusedError(Exception):
    """A pattern can't be fused. The message is the reason, without the node's name."""
