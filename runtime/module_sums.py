"""What the modules of a package hold together on each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitc.runtime.manifest import Manifest


@dataclass(frozen=True)
class HeldTogether:
    """The bytes that all modules hold on a device. Modules run one after the other: `activations` are the most of one.

    `running` is the most that one of them needs beyond weights and caches.
    """

    weights: int = 0
    activations: int = 0
    cache: int = 0
    running: int = 0

    @property
    def total(self) -> int:
        """The most bytes at any time."""
        return self.weights + self.cache + self.running


def sum_modules(manifests: Mapping[str, Manifest]) -> dict[str, HeldTogether]:
    """What all modules hold, by device."""
    found: dict[str, HeldTogether] = {}
    for manifest in manifests.values():
        for rank in manifest.ranks:
            before = found.get(rank.device, HeldTogether())
            found[rank.device] = HeldTogether(
                before.weights + rank.weights_bytes,
                max(before.activations, rank.activation_bytes),
                before.cache + rank.cache_bytes,
                max(before.running, rank.total_bytes - rank.weights_bytes - rank.cache_bytes),
            )
    return found
