"""What kinds of devices are known to do in a second, and what each thing costs there, where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct


class Link(Struct, frozen=True):
    """Seconds that a value takes between two devices: `latency`, and `per_byte` for each of its bytes."""

    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        """For so many bytes."""
        return self.latency + size * self.per_byte


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device. Times are in seconds, sizes in bytes.

    `names` are parts of the names of devices that it is of, `compute_capabilities` those of GPUs.

    - `flops` and `bytes` a second: of one core of a CPU, of a whole GPU.
    - `copy` and `sum`: between two such devices, of one value.
    - `engine_start`: to start an engine, beside what it computes; on GPUs as part of a CUDA graph.
    - `kernel`: a kernel that has next to nothing to do.
    - `cold_link`: what a copy takes beyond what the link was measured to take, when the devices have had other things
      to do meanwhile.
    - `engine_bytes`: what an ONNX Runtime session takes beside weights and activations.
    - `kernel_copy_bytes`: up to this size a captured copy is faster as a kernel.
    - `two_step_bytes`: from this size on an all-reduce over more than two is faster as reduce-scatter and all-gather.
    """

    kind: str
    names: Sequence[str]
    compute_capabilities: Sequence[str]
    flops: float
    bytes: float
    copy: Link
    sum: Link
    engine_start: float
    kernel: float = 0.0
    cold_link: float = 0.0
    engine_bytes: int = 0
    kernel_copy_bytes: int = 0
    two_step_bytes: int = 1 << 20


# One core of a server's CPU. Ranks are threads of one process, which hand a value on as it is and wake each other.
CPU = DeviceProfile(
    kind="cpu",
    names=(),
    compute_capabilities=(),
    flops=1.5e11,
    bytes=2.5e10,
    copy=Link(3e-5, 0.0),
    sum=Link(6e-5, 2e-10),
    engine_start=4e-5,
)
# What half precision reaches on a data center's GPU of 2022. PCI Express 4 between them; all is replayed. Measured on
# H200s, with ONNX Runtime 1.31: `kernel`, `cold_link`, `engine_bytes` (at the peak of a decoder in tensor mode: 20 MiB
# when it is loaded) and `kernel_copy_bytes` (a kernel begins 2 to 4 microseconds after another GPU's, and a copy that
# is none takes 10 more before and after it).
HOPPER = DeviceProfile(
    kind="cuda",
    names=("H100", "H200", "GH200"),
    compute_capabilities=("9.0",),
    flops=4e14,
    bytes=3e12,
    copy=Link(1e-5, 5e-11),
    sum=Link(1e-5, 1e-10),
    engine_start=2e-6,
    kernel=2e-6,
    cold_link=5e-6,
    engine_bytes=42 << 20,
    kernel_copy_bytes=1 << 20,
)
# The first of a kind is taken for devices that are not known.
PROFILES = (CPU, HOPPER)
# Between a CPU device and a GPU.
MIXED_COPY, MIXED_SUM = Link(5e-5, 1e-10), Link(1e-4, 4e-10)


@dataclass(frozen=True)
class HostCosts:
    """What requests cost on the host, and how CPU devices share it. Times are in seconds.

    - `array`: to feed an engine an array or give one. `part`: to cut or join one of which ranks have parts.
    - `thread_gain`, `bandwidth_gain`: how much of another thread's work, or another core's bandwidth, is gained by
      using it for one operator: threads wait for each other, and the cores of a CPU share its memory.
    - `single_thread`: what takes less than this is not spread over threads.
    - `crowded`: the share of their speed that CPU devices keep which wait for memory at the same time.
    - `jitter`: where ranks meet again and again the slower one is waited for, for so much of the time between.
    """

    array: float = 5e-6
    part: float = 1e-5
    thread_gain: float = 0.9
    bandwidth_gain: float = 0.15
    single_thread: float = 2e-5
    crowded: float = 0.9
    jitter: float = 0.1


HOST = HostCosts()


def find_profile(kind: str, name: str = "", compute_capability: str | None = None) -> DeviceProfile:
    """The profile of a device of the kind `cpu` or `cuda`: by its name, by its compute capability, else any."""
    alike = [profile for profile in PROFILES if profile.kind == kind]
    named = [profile for profile in alike if any(each in name for each in profile.names)]
    capable = [profile for profile in alike if compute_capability in profile.compute_capabilities]
    return (named or capable or alike)[0]
