"""Which feeds and outputs of a session may stay on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.arrays.array import number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.requests.rank_kinds import THREADS


class DeviceArrays:
    """The arrays that may stay on a GPU: none unless the rank is a thread of this process.

    CUDA shares memory between processes by handles of whole allocations. A handle costs more to open than a copy, and
    memory that was itself opened from a handle, as a server's tensors are, has none.
    """

    def __init__(self, manifest: Manifest, devices: Sequence[Device], ranks: str) -> None:
        self.possible = ranks == THREADS and devices[0].kind == "cuda"
        cut = {part.name for rank in manifest.ranks for part in rank.parts}
        given = {tensor.name for tensor in manifest.outputs}
        whole = {tensor.name for tensor in manifest.inputs} - cut - given
        self.feeds = frozenset(whole if self.possible else ())
        self._odd = [tensor for tensor in manifest.outputs if number_type(tensor.dtype).isbuiltin != 1]

    def check_outputs(self) -> None:
        """Raise MisuseError if outputs can't stay on a GPU."""
        if not self.possible:
            raise MisuseError(
                "on_device: outputs can stay on a GPU if it has the whole model, in a thread of this process. Here "
                "ranks are on CPUs, or in processes of their own, whose memory this one does not see: leave it out"
            )
        if self._odd:
            name, dtype = self._odd[0].name, self._odd[0].dtype
            raise MisuseError(f"on_device: CuPy has no arrays of {dtype}, which '{name}' is: leave it out")
