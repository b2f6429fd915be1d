"""Join the ranks' outputs of a request."""

from __future__ import annotations

from splitc.runtime.arrays import Array, number_type
from splitc.runtime.manifest import Manifest, Part
from splitc.runtime.parts import join_parts
from splitc.runtime.ranks.request import InFlightRequest


class OutputJoiner:
    """Joins the ranks' outputs: whole ones, sharded ones, and outputs that are inputs."""

    def __init__(self, manifest: Manifest) -> None:
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
        joined.update({name: join_parts(each) for name, each in parts.items()})
        joined.update({name: request.feeds[name].copy() for name in self._passed})
        return {
            # TensorRT before version 10 gives int32 for outputs that are int64 in the model.
            tensor.name: joined[tensor.name].astype(number_type(tensor.dtype), copy=False)
            for tensor in self._outputs
            if tensor.name in joined
        }
