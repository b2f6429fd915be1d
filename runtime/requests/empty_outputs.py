"""Refuse requests without rows or tokens, with which ONNX Runtime would end the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.errors import FeedError
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest, Tensor

# Why.
ON_GPUS = "GPUs run no requests without rows or tokens"
ON_CPUS = "ONNX Runtime would end the process: this model's engines run no requests without it"


class EmptyOutputs:
    """The sizes that must not be 0.

    - On CPU devices: sizes of some operators (LSTM, GRU, GroupQueryAttention), which the manifest lists.
    - On GPUs: sizes that inputs share with an output, and those that all inputs share. ONNX Runtime's attention divides
      by sizes: SIGFPE ends the process. It also fuses attention when it loads an engine, so every package is checked.

    States may be empty.
    """

    def __init__(self, manifest: Manifest, devices: Sequence[Device]) -> None:
        self._places: list[tuple[str, int, str, str]] = []
        if manifest.engine != ONNXRUNTIME:
            return
        if any(device.kind == "cuda" for device in devices):
            states = {name for state in manifest.states for name in (state.input, state.output)}
            inputs = [tensor for tensor in manifest.inputs if tensor.name not in states and tensor.shape]
            sizes = set.intersection(*map(_symbols, inputs)) if inputs else set()
            sizes = sizes.union(*(_symbols(output) for output in manifest.outputs if output.name not in states))
            self._places += _places(inputs, sizes, ON_GPUS)
        self._places += _places(manifest.inputs, set(manifest.filled_sizes), ON_CPUS)

    def check(self, feeds: Mapping[str, Feed]) -> None:
        """Raise FeedError if outputs would have no elements."""
        for name, axis, size, why in self._places:
            if name in feeds and feeds[name].shape[axis] == 0:
                raise FeedError(f"'{size}' is 0 in the input '{name}', and {why}")


def _places(inputs: Sequence[Tensor], sizes: set[str], why: str) -> Iterator[tuple[str, int, str, str]]:
    """The axes of inputs with these sizes, which must not be 0."""
    for tensor in inputs:
        for axis, size in enumerate(tensor.shape or ()):
            if isinstance(size, str) and size in sizes:
                yield tensor.name, axis, size, why


def _symbols(tensor: Tensor) -> set[str]:
    return {size for size in tensor.shape or () if isinstance(size, str)}
