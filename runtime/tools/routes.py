"""The ways in which a package's values are copied between GPUs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

from splitc.runtime.hardware.devices import DeviceStatus, device_named
from splitc.runtime.package.manifest import Manifest, is_fed
from splitc.runtime.package.steps import Reduce, Send

# Descriptions of the values of `DeviceStatus.peers`.
WAYS = {"peer": "directly", "host": "through the host's pinned memory"}


def find_routes(manifest: Manifest, look: Callable[[], Sequence[DeviceStatus]]) -> dict[str, list[str]]:
    """Pairs of GPUs that exchange values in the package, such as `cuda0-cuda1`, by the way of their copies.

    `look` lists the devices of this machine; GPUs elsewhere are left out. It is slow on machines with GPUs, so it is
    only called if the package has several GPUs.
    """
    pairs = sorted(_exchanging(manifest))
    peers = {device.name: device.peers for device in look()} if pairs else {}
    routes: dict[str, list[str]] = {}
    for one, other in pairs:
        if way := peers.get(one, {}).get(other):
            routes.setdefault(WAYS[way], []).append(f"{one}-{other}")
    return routes


def _exchanging(manifest: Manifest) -> set[tuple[str, str]]:
    """The pairs of GPUs that exchange values, without repetition."""
    ranks = manifest.ranks
    numbers = set()
    for number, rank in enumerate(ranks):
        for step in rank.program:
            if isinstance(step, Send):
                numbers.add((number, step.target))
            elif isinstance(step, Reduce):
                numbers.update(permutations(step.ranks, 2))
        for engine in rank.engines:
            fed = (
                [member for member in engine.group if is_fed(ranks[member])]
                if is_fed(rank)
                else [*engine.group[:1], number]
            )
            numbers.update(permutations(fed, 2))
    pairs = {(ranks[one].device, ranks[other].device) for one, other in numbers}
    return {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1] and all(map(_is_gpu, pair))}


def _is_gpu(name: str) -> bool:
    return device_named(name).kind == "cuda"
