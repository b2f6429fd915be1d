"""Which feeds and outputs of a session may stay on a GPU, and a request's outputs, joined from those of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.on_gpu import GpuFeed
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.gpus import need_cupy
from splitc.runtime.hardware.heap import keep_freed_arrays
from splitc.runtime.package.manifest import Manifest, Part
from splitc.runtime.package.parts import join_parts
from splitc.runtime.ranks.request import InFlightRequest
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


class OutputJoiner:
    """Joins the ranks' outputs: whole ones, sharded ones, and outputs that are inputs.

    Outputs that stay on GPUs are joined on the first rank's.
    """

    def __init__(self, manifest: Manifest, devices: Sequence[Device]) -> None:
        keep_freed_arrays()
        self._first = devices[0]
        self._outputs = manifest.outputs
        self._passed = {tensor.name for tensor in manifest.inputs} & {tensor.name for tensor in manifest.outputs}
        self._parts = [{part.name: part for part in rank.parts} for rank in manifest.ranks]

    def join(self, request: InFlightRequest) -> dict[str, Array]:
        """The outputs by name, in the model's order, without those that stay on the ranks."""
        joined: dict[str, Array] = {}
        parts: dict[str, list[tuple[Part, Array]]] = {}
        for number, own in enumerate(self._parts):
            for name, array in request.outputs[number].items():
                if name in own:
                    parts.setdefault(name, []).append((own[name], array))
                else:
                    joined[name] = array
        joined.update({name: self._join(own_parts, request.on_device) for name, own_parts in parts.items()})
        joined.update({name: self._pass_on(request, name) for name in self._passed})
        return {
            # TensorRT before version 10 gives int32 for outputs that are int64 in the model.
            tensor.name: joined[tensor.name].astype(number_type(tensor.dtype), copy=False)
            for tensor in self._outputs
            if tensor.name in joined
        }

    def _join(self, parts: Sequence[tuple[Part, Any]], on_device: bool) -> Any:
        if not on_device:
            return join_parts(parts)
        return self._put(join_parts([(part, array.get()) for part, array in parts]))

    def _pass_on(self, request: InFlightRequest, name: str) -> Any:
        feed = request.feeds[name]
        assert not isinstance(feed, GpuFeed), "those do not stay on GPUs"
        return self._put(feed) if request.on_device else feed.copy()

    def _put(self, array: Array) -> Any:
        """A copy on the first rank's GPU."""
        cupy = need_cupy()
        with cupy.cuda.Device(self._first.number_here):
            return cupy.asarray(array)
