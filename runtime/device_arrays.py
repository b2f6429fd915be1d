"""Which feeds and outputs of a session may be on GPUs without a way through the host."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.arrays import number_type
from splitc.runtime.devices import Device
from splitc.runtime.errors import MisuseError
from splitc.runtime.manifest import Manifest
from splitc.runtime.rank_kinds import THREADS


class DeviceArrays:
    """What may stay on GPUs: something only where all ranks are threads, each on a GPU that this process sees.

    A process of its own has other addresses. CUDA passes memory on between processes by handles of whole allocations,
    but not what came by such a handle itself, as a server's tensors do, and each costs more to open than a copy.
    """

    def __init__(self, manifest: Manifest, devices: Sequence[Device], ranks: str) -> None:
        self.possible = ranks == THREADS and all(device.kind == "cuda" for device in devices)
        cut = {part.name for rank in manifest.ranks for part in rank.parts}
        given = {tensor.name for tensor in manifest.outputs}
        whole = {tensor.name for tensor in manifest.inputs} - cut - given
        self.feeds = frozenset(whole if self.possible else ())
        self._odd = [each for each in manifest.outputs if number_type(each.dtype).isbuiltin != 1]

    def check_outputs(self) -> None:
        """Raise MisuseError if outputs can't stay on GPUs."""
        if not self.possible:
            raise MisuseError(
                "on_device: outputs stay on GPUs where all ranks are threads that have one; here they are processes of "
                "their own, or on CPUs: open the session on GPUs with ranks='threads', or leave it out"
            )
        if self._odd:
            name, dtype = self._odd[0].name, self._odd[0].dtype
            raise MisuseError(f"on_device: CuPy has no arrays of {dtype}, which '{name}' is: leave it out")
