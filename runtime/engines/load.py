"""The backend that loads a package's engines on a device."""

from __future__ import annotations

from splitc.runtime.devices import Device
from splitc.runtime.engines import Backend
from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.engines.onnxruntime import OnnxRuntimeBackend


def make_backend(engine: str, device: Device, threads: int) -> Backend:
    """What loads engines of the kind on the device, a CPU device with so many threads."""
    assert engine == ONNXRUNTIME and device.kind == "cpu"
    return OnnxRuntimeBackend(threads)
