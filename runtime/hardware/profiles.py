"""Typical speeds and costs of kinds of devices, used where nothing was measured on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_seconds, parse_bandwidth, parse_seconds, shortened


class Link(Struct, frozen=True):
    """The seconds that a value takes between two devices: `latency`, plus `per_byte` for each byte."""

    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        """The time for `size` bytes."""
        return self.latency + size * self.per_byte

    def __str__(self) -> str:
        return f"{1e-9 / self.per_byte:.3g} GB/s, {format_seconds(self.latency)}"

    @property
    def option(self) -> str:
        """As `parse_link` reads it."""
        return f"{1e-9 / self.per_byte:.6g}GB/s,{1e6 * self.latency:.6g}us"


def parse_link(text: str) -> Link:
    """A link from its bandwidth and its latency: `25GB/s,5us`. Raises MisuseError for any other text."""
    bandwidth, comma, latency = text.partition(",")
    if not comma:
        raise MisuseError(
            f"can't read '{shortened(text)}' as a link: write its bandwidth and latency, as in 25GB/s,5us"
        )
    return Link(parse_seconds(latency), 1 / parse_bandwidth(bandwidth))


@dataclass(frozen=True)
class DeviceProfile:
    """A kind of device. Times are in seconds, sizes in bytes.

    - `flops` and `bytes`: operations and bytes per second, of one core of a CPU or of a whole GPU.
    - `copy` and `sum`: of one value, between two such devices.
    - `more_ranks`: what each rank beyond the second adds to the time of a sum, as a share of it.
    - `engine_start`: to start an engine, beyond its computation; on GPUs as part of a CUDA graph.
    - `kernel`: the time of a kernel with almost no work.
    - `launch`: what each kernel takes beyond its work, to start and to drain.
    - `step`: the time of one step of a recurrent network.
    - `exposed`: the share of the shorter of computing and moving bytes that the longer one does not hide.
    - `attention`: the share of `flops` that attention as one operator reaches; `attention_start`: what it takes beyond.
    - `jitter`: the time that ranks wait for the slowest one at a collective, as a share of the time between two.
    - `cold_link`: the time of a copy beyond the measured one, if the devices had other work since the last copy.
    - `engine_bytes`: the memory of an ONNX Runtime session beside weights and activations.
    - `library_bytes`: the same of all sessions of a rank together.
    - `communicator_bytes`: what NCCL takes of each GPU to connect two ranks; `peer_bytes`, for each further GPU of the
      host that it sums with; `sum_bytes`, where NCCL adds the sums itself.
    - `kernel_copy_bytes`: up to this size, a captured copy is faster as a kernel.
    """

    flops: float
    bytes: float
    copy: Link
    sum: Link
    engine_start: float
    more_ranks: float = 1.0
    kernel: float = 0.0
    launch: float = 0.0
    step: float = 0.0
    exposed: float = 0.5
    attention: float = 1.0
    attention_start: float = 0.0
    jitter: float = 0.1
    cold_link: float = 0.0
    engine_bytes: int = 0
    library_bytes: int = 0
    communicator_bytes: int = 0
    peer_bytes: int = 0
    sum_bytes: int = 0
    kernel_copy_bytes: int = 0


# One core of a server's CPU: typical figures, which those of `devices --measure` replace. Ranks are threads of one
# process: they pass values without a copy, and wake each other. Measured: of 184 times of decoders in three runs of
# `tests.benchmarks.auto`, 167 are within 30 % with `exposed`, 160 without.
CPU = DeviceProfile(
    flops=1.5e11,
    bytes=2.5e10,
    copy=Link(3e-5, 0.0),
    sum=Link(6e-5, 2e-10),
    engine_start=4e-5,
    kernel=5e-6,
)
# A data center's GPU of 2022, in half precision, with PCI Express 4 and replayed requests. `flops` is that of large
# products. Measured on H200s with ONNX Runtime 1.31:
# - `launch`, `exposed`: 190 distinct kernels of SDXL's U-Net and of Flux, for one image and for two, take 0.87 to 1.0
#   of their measured time in sum. Products reach 400 to 775 TFLOP/s.
# - `attention`, `attention_start`: cuDNN's attention reaches 125 TFLOP/s (8 x 257 tokens, 16 heads of 80), 300
#   (2 x 1,024, 20 of 64), 515 (2 x 4,096, 10 of 64) and 690 (4,608, 24 of 128), or 536 for the last within FLUX.1-dev.
# - `step`: cuDNN's LSTMs and GRUs take 14 to 20 microseconds for each of 50 to 1,000 steps of 1 to 32 sequences with
#   128 to 1,024 units, eagerly; replayed, 450 steps of an audio codec take 7 each.
# - `cold_link`; `engine_bytes` at the peak of a decoder in tensor mode (20 MiB after loading).
# - `communicator_bytes` and `peer_bytes`: 0.7 GiB on two GPUs, 1.0 on four, little without peer access.
# - `kernel_copy_bytes`: a kernel begins 2 to 4 microseconds after another GPU's; a copy that is no kernel takes 10 more
#   before and after it.
# - `more_ranks`: a token's sums take 2.6 microseconds on two GPUs and 4 on four; NCCL's 6.6 and 9.7.
# An estimate: `jitter`. Without it, predicted times in tensor mode on two H200s are above the measured ones for a token
# of a decoder and for FLUX.1-dev, and for SDXL's U-Net by calculation 0.15 below those measured with an older version.
# Measured on H100s: `library_bytes` (a decoder, FLUX.1-dev's shape and that of SDXL's U-Net); `sum_bytes` (0.82 GiB
# between loading and the peak of two decoders of TensorRT's in tensor mode; 0.6 to 0.7 in layer and row mode).
HOPPER = DeviceProfile(
    flops=6.5e14,
    bytes=3e12,
    copy=Link(1e-5, 5e-11),
    sum=Link(1e-5, 1e-10),
    engine_start=2e-6,
    more_ranks=0.25,
    launch=2.5e-6,
    step=7e-6,
    exposed=0.15,
    attention=0.66,
    attention_start=8e-6,
    jitter=0.05,
    cold_link=5e-6,
    engine_bytes=42 << 20,
    library_bytes=240 << 20,
    communicator_bytes=700 << 20,
    peer_bytes=170 << 20,
    sum_bytes=150 << 20,
    kernel_copy_bytes=1 << 20,
)
# By kind of device: plans for other GPUs have these figures too, where nothing was measured.
PROFILES = {"cpu": CPU, "cuda": HOPPER}
# Links between a CPU device and a GPU: half of the bandwidth between GPUs; an eighth for sums, which the host computes.
# Typical figures, which those of `devices --measure` replace.
MIXED_COPY, MIXED_SUM = Link(5e-5, 1e-10), Link(1e-4, 4e-10)

# Between two hosts: an InfiniBand card of 200 Gbit/s (HDR), and the latency that NCCL's tuning tables have for small
# values: 6.8 microseconds for a collective (`baseLat`, protocol LL) and 5 for a step over a network (`hwLat`, NET).
INTERCONNECT = Link(1.2e-5, 4e-11)


@dataclass(frozen=True)
class HostCosts:
    """The costs of requests on the host, and how CPU devices share it. Times are in seconds.

    - `array`: to feed an array to an engine, or to take an output. `part`: to cut or join a sharded array.
    - `thread_hop`, `process_hop`: a request's way to a GPU's rank, or back, if the rank is a thread or a process.
      Measured on H100s and H200s: 0.2 and 0.35 to 0.4 milliseconds for both ways of a token.
    - `thread_gain`, `bandwidth_gain`: what another thread, or another core's bandwidth, adds to an operator, as a share
      of the first one: threads wait for each other, and cores share the memory.
    - `cached`: bytes per second that a core reads or writes in its cache. Measured: of 64 times on two cores, 55 are
      within 30 % with it and the profile's `kernel`, 38 without.
    - `spreading`: to spread an operator over threads, and to wait for them. An operator that would take longer than on
      one thread is not spread. Measured: a product of 27 microseconds takes 8 on 8 threads, and 8 on 16.
    - `crowded`: the share of their speed that CPU devices keep if they wait for memory at the same time.

    The others are estimates: `tests.benchmarks.auto` compares what follows from all of them with measured times.
    """

    array: float = 5e-6
    part: float = 1e-5
    thread_hop: float = 1e-4
    process_hop: float = 1.9e-4
    thread_gain: float = 0.9
    bandwidth_gain: float = 0.15
    cached: float = 5e10
    spreading: float = 5e-6
    crowded: float = 0.9


HOST = HostCosts()
