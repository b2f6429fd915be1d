"""Why a pattern stays as it is."""

from __future__ import annotations


class NotFusedError(Exception):
    """A pattern can't be fused. The message is the reason, without the node's name."""
