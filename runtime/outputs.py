"""The outputs of a request, of those that its ranks gave."""

from __future__ import annotations

from splitc.runtime.arrays import Array, number_type
from splitc.runtime.manifest import Manifest, Part
from splitc.runtime.parts import join_parts
from splitc.runtime.ranks.request import InFlightRequest


class OutputJoiner:
    """Joins the ranks' outputs: whole ones, those of which ranks have parts, and inputs that are handed back."""

    def __init__(self, manifest: Manifest) -> None:
        self._outputs = manifest.outputs
        self._passed = {tensor.name for tensor in manifest.inputs} & {tensor.name for tensor in manifest.outputs}
        self._parts = [{part.name: part for part in rank.parts} for rank in manifest.ranks]

    def join(self, request: InFlightRequest) -> dict[str, Array]:
        """The outputs by name, in the model's order; without those that stay on the ranks."""
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
            # Before version 10 TensorRT gives int32 where the model says int64.
            tensor.name: joined[tensor.name].astype(number_type(tensor.dtype), copy=False)
            for tensor in self._outputs
            if tensor.name in joined
        }
