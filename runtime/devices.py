"""Device names, the devices of this machine, and their memory.

There are as many of `cpu0`, `cpu1`, ... as a user asks for: each is one rank with a share of the cores and the memory.
`cuda0`, ... are NVIDIA GPUs in CUDA's order, which CUDA_VISIBLE_DEVICES changes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from splitc.runtime.errors import MisuseError
from splitc.runtime.gpus import list_gpus
from splitc.runtime.units import parse_bytes, shortened

KINDS = ("cpu", "cuda")
_NAME = re.compile(r"(?P<kind>[a-z]+):?(?P<index>[0-9]{1,9})")
_COUNT = re.compile(r"(?P<count>[0-9]{1,9})x(?P<kind>[a-z]+)")
# The most devices.
MOST = 1024


@dataclass(frozen=True)
class Device:
    """One device by kind and index; prints as `cpu0`.

    `ordinal` is CUDA's number of a GPU in a process that does not see all of them.
    """

    kind: str
    index: int
    ordinal: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


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


def parse_devices(texts: Sequence[str]) -> list[Device]:
    """The devices named by `-d` values, in order: `cpu0`, `CPU:0`, `cpu0&cpu1`, `3xcpu`. One may be named twice.

    Raises MisuseError for an unknown name. The message says which ones there are.
    """
    devices: list[Device] = []
    for text in texts:
        for name in re.split(r"[&,]", text):
            devices += _parse_one(name.strip())
    if not devices:
        raise MisuseError("no device given: name them with -d, as in -d cpu0 -d cpu1 or -d 2xcpu")
    return devices


def _parse_one(name: str) -> list[Device]:
    lowered = name.lower()
    many = _COUNT.fullmatch(lowered)
    if many and many["kind"] in KINDS and int(many["count"]) > 0:
        if int(many["count"]) > MOST:
            raise MisuseError(f"'{name}' are more devices than splitc plans for, which is {MOST}")
        return [Device(many["kind"], index) for index in range(int(many["count"]))]
    one = _NAME.fullmatch(lowered)
    if one and one["kind"] in KINDS:
        return [Device(one["kind"], int(one["index"]))]
    raise MisuseError(
        f"unknown device '{shortened(name)}': there are cpu0, cpu1, ... as many as you ask for (3xcpu is the first "
        "three), and NVIDIA GPUs as cuda0, cuda1, ..."
    )


def list_devices() -> list[DeviceStatus]:
    """The devices of this machine. All CPU devices are one entry, since they share one memory."""
    memory = psutil.virtual_memory()
    found = [DeviceStatus("cpu0, cpu1, ...", f"{cores()} cores", memory.total, memory.available)]
    for gpu in list_gpus():
        peers = {f"cuda{other}": "peer" if direct else "host" for other, direct in gpu.peers.items()}
        found.append(
            DeviceStatus(f"cuda{gpu.index}", gpu.name, gpu.total_bytes, gpu.free_bytes, gpu.compute_capability, peers)
        )
    return found


def cores() -> int:
    """The number of cores that this process may use."""
    process = psutil.Process()
    # Not every platform can pin a process (macOS has no affinity).
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1


def cache_bytes() -> int:
    """The size of the processor's last-level cache in bytes; 0 if the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((parse_bytes(f"{size}iB") for size in sizes), default=0)  # files have text such as 32768K


def threads_for(devices: Sequence[Device], threads: int | None) -> int:
    """Threads of one CPU device: as asked for, or else an equal share of the cores, at least one."""
    return threads or max(1, cores() // max(1, sum(device.kind == "cpu" for device in devices)))


def free_bytes(devices: Sequence[Device]) -> list[int | None]:
    """Free bytes for each rank. Ranks that share a memory get equal shares of it. None for a GPU that is absent."""
    places = [memory_of(device) for device in devices]
    memory: dict[str, int | None] = {"cpu": psutil.virtual_memory().available}
    if any(place != "cpu" for place in places):
        memory.update({f"cuda{gpu.index}": gpu.free_bytes for gpu in list_gpus()})
    sharers = Counter(places)
    return [None if (free := memory.get(place)) is None else free // sharers[place] for place in places]


def memory_of(device: Device) -> str:
    """The memory that a device uses: all CPU devices have one, each GPU has its own."""
    return "cpu" if device.kind == "cpu" else str(device)
