"""How groups of devices lie on hosts: each inside one host, if it has enough devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.resources import Budget
from splitc.runtime.hardware.devices import Device

# Every number of devices or hosts up to this one is tried. Above it, only powers of two and the number of all. A
# choice: heads and widths divide by powers of two, and each number tried is a plan.
FEW = 4


def numbers_to_try(count: int) -> list[int]:
    """The numbers of devices, or of hosts, to plan with if there are `count`."""
    return [n for n in range(1, count + 1) if n <= FEW or n == count or n & (n - 1) == 0]


def single_groups(hosts: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """The numbers of devices to try as a single group: in one host, on two, and all of them.

    `hosts` has the number of devices of each host, largest first.
    """
    return [n for n in numbers if n > 1 and (n <= hosts[0] or n in (sum(hosts[:2]), sum(hosts)))]


def host_sizes(devices: Sequence[Device]) -> list[int]:
    """The number of devices on each host, largest first."""
    return sorted(Counter(device.host for device in devices).values(), reverse=True)


def group_devices(devices: Sequence[Device], budgets: Sequence[Budget], groups: int, size: int) -> list[int]:
    """The places of the devices for `groups` groups of this size, one group after the other, in the devices' order.

    A group is inside a host if any has enough devices left. Devices with the largest budgets are taken.
    """
    hosts = [[place for place, device in enumerate(devices) if device.host == host] for host in _hosts(devices)]
    roomy = [_by_room(places, budgets) for places in hosts]
    offers = [
        (-(budgets[places[first + size - 1]] or 0), host, first)
        for host, places in enumerate(roomy)
        for first in range(0, len(places) - size + 1, size)
    ]
    inside = Counter(host for _, host, _ in sorted(offers)[:groups])
    groups_inside = [_cut(sorted(places[: inside[host] * size]), size) for host, places in enumerate(roomy)]
    left = [place for host, places in enumerate(roomy) for place in places[inside[host] * size :]]
    across = _by_room(sorted(left), budgets)[: (groups - inside.total()) * size]
    return [place for group in sorted(sum(groups_inside, _cut(sorted(across), size))) for place in group]


def _hosts(devices: Sequence[Device]) -> list[int | None]:
    return list(dict.fromkeys(device.host for device in devices))


def _by_room(places: Sequence[int], budgets: Sequence[Budget]) -> list[int]:
    return sorted(places, key=lambda place: -(budgets[place] or 0))


def _cut(places: Sequence[int], size: int) -> list[list[int]]:
    return [list(places[first : first + size]) for first in range(0, len(places), size)]


def count_hosts(ranks: Sequence[RankPlan]) -> int:
    """The number of hosts that the ranks are on."""
    return len(_hosts([rank.device for rank in ranks]))


def describe_hosts(ranks: Sequence[RankPlan]) -> str:
    """How the ranks' groups lie on hosts, for tables: `2 hosts, groups inside`. Empty for ranks without hosts."""
    if ranks[0].device.host is None:
        return ""
    hosts = count_hosts(ranks)
    if hosts == 1:
        return "1 host"
    places = {(rank.replica, rank.group, rank.device.host) for rank in ranks}
    groups = len({(rank.replica, rank.group) for rank in ranks})
    if groups == len(ranks):
        return f"{hosts} hosts"
    return f"{hosts} hosts, groups {'inside' if len(places) == groups else 'across'}"
