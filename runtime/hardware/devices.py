"""Device names, the devices of this machine, and their memory.

There are as many of `cpu0`, `cpu1`, ... as a user asks for: each is one rank with a share of the cores and the memory.
`cuda0`, ... are NVIDIA GPUs in CUDA's order, which CUDA_VISIBLE_DEVICES changes. `host1/cuda0` is a device of another
machine. Which machine is `host1` is not known before a package runs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.control_groups import cpu_limit, memory_limit
from splitc.runtime.hardware.gpus import count_gpus, list_gpus
from splitc.runtime.units import parse_bytes, shortened, whole_number

KINDS = ("cpu", "cuda")
_ON_HOST = r"(?:host(?P<host>[0-9]{1,9})/)?"
_NAME = re.compile(_ON_HOST + r"(?P<kind>[a-z]+):?(?P<index>[0-9]{1,9})")
_COUNT = re.compile(_ON_HOST + r"(?P<count>[0-9]{1,9})x(?P<kind>[a-z]+)")
_HOSTS = re.compile(r"(?P<hosts>[0-9]{1,9})x(?P<devices>[0-9]{1,9}x[a-z]+)")
# The most devices: as many ranks can meet (native/meeting.h).
MOST = 1024


@dataclass(frozen=True)
class Device:
    """One device by kind and index, and by host if there are several; prints as `cpu0` or `host1/cpu0`.

    `ordinal` is CUDA's number of a GPU in a process that does not see all of them.
    """

    kind: str
    index: int
    ordinal: int | None = field(default=None, compare=False)
    host: int | None = None

    def __str__(self) -> str:
        name = f"{self.kind}{self.index}"
        return name if self.host is None else f"host{self.host}/{name}"

    @property
    def number_here(self) -> int:
        """CUDA's number of a GPU in this process."""
        return self.index if self.ordinal is None else self.ordinal

    @property
    def local(self) -> Device:
        """The device of this kind and index on whatever machine this is."""
        return replace(self, host=None)


@dataclass(frozen=True)
class DeviceStatus:
    """A device's current state. Memory is in bytes; CPU devices share their memory and cores.

    `peers` says how this GPU copies to each other one: `peer` (directly) or `host` (through the host's memory).
    """

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    compute_capability: str | None = None
    peers: dict[str, str] = field(default_factory=dict)


def parse_devices(texts: Sequence[str] | str) -> list[Device]:
    """The devices named by `-d` values, in order: `cpu0`, `CPU:0`, `cpu0&cpu1`, `3xcpu`, `host1/cuda0`, `host1/2xcuda`.

    One may be named twice. Without any, all GPUs that are seen here. Raises MisuseError if there are none, for an
    unknown name, with those that there are, and if only some devices have a host.
    """
    devices: list[Device] = []
    for text in [texts] if isinstance(texts, str) else texts:
        for name in re.split(r"[&,]", str(text)):
            devices += _parse_one(name.strip())
    devices = devices or [Device("cuda", index) for index in range(count_gpus())]
    if not devices:
        raise MisuseError("no device given, and no GPU is seen here: name some (-d), as in 2xcpu, or cuda0 and cuda1")
    placed = [device for device in devices if device.host is not None]
    if placed and (others := [device for device in devices if device.host is None]):
        raise MisuseError(
            f"{placed[0]} names its host and {others[0]} does not: name the host of every device, or of none"
        )
    return devices


@lru_cache(MOST)  # a page asks for every step of every request
def device_named(name: str) -> Device:
    """The one device of this name, as packages have it. Raises MisuseError for an unknown name."""
    (device,) = parse_devices([name])
    return device


def parse_hosts(text: str) -> list[Device]:
    """The devices of hosts that are alike: `2x4xcuda` is two hosts with four GPUs each, `host0/cuda0` and so on.

    Raises MisuseError for any other text.
    """
    match = _HOSTS.fullmatch(text.strip().lower())
    if not match or not int(match["hosts"]):
        raise MisuseError(
            f"can't read --hosts '{shortened(text)}': write 2x4xcuda for two hosts with four GPUs each. For hosts that "
            "differ, name the devices (-d), as in host0/4xcuda and host1/2xcuda"
        )
    hosts, devices = int(match["hosts"]), _parse_one(match["devices"])
    if hosts * len(devices) > MOST:
        raise MisuseError(f"'{shortened(text)}' are too many devices: splitc plans for at most {MOST}")
    return [replace(device, host=host) for host in range(hosts) for device in devices]


def host_numbers(devices: Sequence[Device]) -> list[int]:
    """The numbers of the devices' hosts, in order; empty for devices of one machine without a name."""
    return sorted({device.host for device in devices if device.host is not None})


def _parse_one(name: str) -> list[Device]:
    lowered = name.lower()
    many = _COUNT.fullmatch(lowered)
    if many and many["kind"] in KINDS and int(many["count"]) > 0:
        if int(many["count"]) > MOST:
            raise MisuseError(f"'{name}' are too many devices: splitc plans for at most {MOST}")
        return [Device(many["kind"], index, host=_host(many)) for index in range(int(many["count"]))]
    one = _NAME.fullmatch(lowered)
    if one and one["kind"] in KINDS:
        return [Device(one["kind"], int(one["index"]), host=_host(one))]
    raise MisuseError(
        f"unknown device '{shortened(name)}': there are cpu0, cpu1, ... as many as you ask for (3xcpu is the first "
        "three), and NVIDIA GPUs as cuda0, cuda1, ...; host1/cuda0 is one of another host"
    )


def _host(match: re.Match[str]) -> int | None:
    return None if match["host"] is None else int(match["host"])


def list_devices() -> list[DeviceStatus]:
    """The devices of this machine. All CPU devices are one entry, since they share one memory."""
    devices = [DeviceStatus("cpu0, cpu1, ...", f"{cores()} cores", *host_memory())]
    for gpu in list_gpus():
        peers = {f"cuda{other}": "peer" if direct else "host" for other, direct in gpu.peers.items()}
        devices.append(
            DeviceStatus(f"cuda{gpu.index}", gpu.name, gpu.total_bytes, gpu.free_bytes, gpu.compute_capability, peers)
        )
    return devices


def host_memory() -> tuple[int, int]:
    """The bytes of memory that this process may use on this machine, and those that are free."""
    import psutil  # ranks' processes and most commands begin sooner without it

    memory, (most, free) = psutil.virtual_memory(), memory_limit()
    return int(min(memory.total, most)), max(0, int(min(memory.available, free)))


def cores() -> int:
    """The number of cores that this process may use: those that it is bound to, or fewer by its control groups."""
    return within_limit(len(bound_cores()))


def within_limit(count: int) -> int:
    """The smaller of `count` and the cores that this process's control groups allow."""
    return max(1, int(min(count, cpu_limit())))


def bound_cores() -> list[int]:
    """The numbers of the cores that this process is bound to: all of the machine, unless it was bound to some."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    import psutil

    process = psutil.Process()
    # Not every platform can pin a process (macOS has no affinity).
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(psutil.cpu_count() or 1))


@cache
def cache_bytes(root: Path = Path("/")) -> int:
    """The size of the processor's last-level cache in bytes; 0 if the system does not say."""
    sizes = [path.read_text().strip() for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size")]
    # Files have text such as 32768K, and none on some virtual machines.
    return max((parse_bytes(f"{size}iB") for size in sizes if size), default=0)


# The most threads of a CPU device: more than cores of any machine, and a system may refuse to start more. A choice.
MOST_THREADS = 1024


def threads_for(devices: Sequence[Device], threads: int | None) -> int:
    """Threads of one CPU device: as asked for, or else an equal share of its host's cores, at least one.

    Raises MisuseError for more than MOST_THREADS, or less than one.
    """
    if threads is not None:
        return whole_number("--threads", threads, 1, MOST_THREADS, of=" for each CPU device")
    on_hosts = Counter(device.host for device in devices if device.kind == "cpu")
    return max(1, cores() // max(on_hosts.values(), default=1))


def free_bytes(devices: Sequence[Device]) -> list[int | None]:
    """Free bytes for each rank. Ranks that share a memory get equal shares of it. None for a GPU that is absent.

    All hosts are assumed to be like this machine.
    """
    places = [memory_of(device.local) for device in devices]
    memory: dict[str, int | None] = {"cpu": host_memory()[1]}
    if any(place != "cpu" for place in places):
        memory.update({f"cuda{gpu.index}": gpu.free_bytes for gpu in list_gpus()})
    sharers = Counter(map(memory_of, devices))
    return [
        None if (free := memory.get(place)) is None else free // sharers[memory_of(device)]
        for place, device in zip(places, devices, strict=True)
    ]


def memory_of(device: Device) -> str:
    """The memory that a device uses: the CPU devices of a host share one, each GPU has its own."""
    if device.kind != "cpu":
        return str(device)
    return "cpu" if device.host is None else f"host{device.host}/cpu"
