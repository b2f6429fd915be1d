"""The memory of all modules of a package together, on each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.gpu.weight_places import swappable_bytes
from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.manifest import Manifest, Rank

# The note on a package, or a plan, with --swap.
IN_TURN = (
    "Modules work in turn (--swap): a device holds the swapped weights of one module, and is sized for the largest."
)


@dataclass(frozen=True)
class HeldTogether:
    """The bytes of all modules on a device.

    - `activations`: the most of one module, since modules run one after the other.
    - `running`: the most that one module needs beyond what stays.
    - `swapped`: the part of `weights` that is there in turn: those of one module, the most.
    - `mapped`: the part of `weights` that stays in files, and takes no memory.
    - `engines`: the engines' own memory.
    - `adapters`: the further memory of requests with adapters.
    """

    weights: int = 0
    activations: int = 0
    cache: int = 0
    running: int = 0
    swapped: int = 0
    mapped: int = 0
    engines: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        """The most bytes at any time."""
        return self.weights - self.mapped + self.cache + self.engines + self.adapters + self.running


def sum_modules(manifests: Mapping[str, Manifest], swap: bool = False) -> dict[str, HeldTogether]:
    """What all modules hold, by device. With `swap`, swapped weights count once."""
    sums: dict[str, HeldTogether] = {}
    for manifest in manifests.values():
        for device in dict.fromkeys(rank.device for rank in manifest.ranks):
            before = sums.get(device, HeldTogether())
            own = [rank for rank in manifest.ranks if rank.device == device]
            moved = sum(rank.weights_bytes - rank.mapped_bytes for rank in own if swap and _can_swap(manifest, rank))
            swapped = max(before.swapped, moved)
            sums[device] = HeldTogether(
                before.weights - before.swapped + sum(rank.weights_bytes for rank in own) - moved + swapped,
                max(before.activations, sum(rank.activation_bytes for rank in own)),
                before.cache + sum(rank.cache_bytes for rank in own),
                max(before.running, sum(map(_running, own))),
                swapped,
                before.mapped + sum(rank.mapped_bytes for rank in own),
                before.engines + sum(rank.engine_bytes for rank in own),
                before.adapters + sum(rank.adapter_bytes for rank in own),
            )
    return {name: sums[name] for name in sorted(sums, key=_place)}


def _running(rank: Rank) -> int:
    """The memory that a rank needs beyond what stays."""
    return rank.total_bytes - rank.loaded_bytes - rank.adapter_bytes - rank.cache_bytes


def _place(name: str) -> tuple[int, str, int]:
    """The place of a device among others, in the order that users expect."""
    device = device_named(name)
    return device.host or 0, device.kind, device.index


def _can_swap(manifest: Manifest, rank: Rank) -> bool:
    """Whether a rank's weights can be moved in and out; on CPU devices the system moves them, as they are files."""
    device = device_named(rank.device)
    kinds = find_kind(manifest.engine).swaps_weights
    return device.kind in kinds and (device.kind == "cpu" or swappable_bytes(rank) > 0)
