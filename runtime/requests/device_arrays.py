"""Which feeds and outputs of a session may be on a GPU without a way through the host."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.arrays.array import number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.requests.rank_kinds import THREADS


class DeviceArrays:
    """What may stay on a GPU: something only where the rank is a thread, on a GPU that this process sees.

    A process of its own has other addresses. CUDA passes memory on between processes by handles of whole allocations,
    but not what came by such a handle itself, as a server's tensors do, and each costs more to open than a copy.
    """

    def __init__(self, manifest: Manifest, devices: Sequence[Device], ranks: str) -> None:
        self.possible = ranks == THREADS and devices[0].kind == "cuda"
        cut = {part.name for rank in manifest.ranks for part in rank.parts}
        given = {tensor.name for tensor in manifest.outputs}
        whole = {tensor.name for tensor in manifest.inputs} - cut - given
        self.feeds = frozenset(whole if self.possible else ())
        self._odd = [each for each in manifest.outputs if number_type(each.dtype).isbuiltin != 1]

    def check_outputs(self) -> None:
        """Raise MisuseError if outputs can't stay on a GPU."""
        if not self.possible:
            raise MisuseError(
                "on_device: outputs stay on a GPU where it has all of the model, as a thread of this process; here "
                "ranks are on CPUs, or processes of their own, whose memory no other one sees: leave it out"
            )
        if self._odd:
            name, dtype = self._odd[0].name, self._odd[0].dtype
            raise MisuseError(f"on_device: CuPy has no arrays of {dtype}, which '{name}' is: leave it out")
