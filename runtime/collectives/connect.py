"""The transport that a session's devices need."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from splitc.runtime.collectives import Transport
from splitc.runtime.collectives.host import connect
from splitc.runtime.devices import Device
from splitc.runtime.engines import Backend


def connect_devices(devices: Sequence[Device], backends: Sequence[Backend]) -> Sequence[Transport]:
    """One end a rank: values are handed on as they are between CPU devices, and copied from, to and between GPUs."""
    ends = connect(len(devices))
    if all(device.kind == "cpu" for device in devices):
        return ends
    from splitc.runtime.collectives.gpu_peers import GpuTransport, check_copies, let_copy
    from splitc.runtime.engines.gpu_backend import Gpu

    gpus = {backend.index: backend for backend in backends if isinstance(backend, Gpu)}
    with ThreadPoolExecutor(1) as pool:  # CuPy's current device and stream are a thread's: the caller's stay
        links = pool.submit(let_copy, gpus).result()
        by_host = pool.submit(check_copies, gpus).result()
    places = [backend.index if isinstance(backend, Gpu) else None for backend in backends]
    return [GpuTransport(end, backend, places, links - by_host, by_host) for end, backend in zip(ends, backends)]
