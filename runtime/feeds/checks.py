"""Check feeds against a model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.arrays.torch_tensors import is_tensor, read_tensor
from splitc.runtime.errors import FeedError
from splitc.runtime.feeds.on_gpu import Feed, is_on_gpu, on_host, read_gpu_feed
from splitc.runtime.package.manifest import FixedInput, Tensor
from splitc.runtime.units import first_few, format_shape


class Inputs:
    """A package's inputs, prepared for checks of many requests.

    Feeds for `optional` inputs may be missing. Those for `fixed` inputs, which the package does not have, are checked
    and left out.
    """

    def __init__(
        self, inputs: Sequence[Tensor], optional: Sequence[Tensor] = (), fixed: Sequence[FixedInput] = ()
    ) -> None:
        self._inputs, self._optional, self._fixed = inputs, optional, {tensor.name: tensor for tensor in fixed}
        self._needed = [tensor.name for tensor in inputs]
        self._wanted = {tensor.name: _Wanted(tensor) for tensor in (*optional, *inputs)}

    def on_host(self, feeds: Mapping[str, npt.ArrayLike], copy: bool = False) -> dict[str, Array]:
        """The feeds as arrays on the host; with `copy` as new ones, which the caller can't change.

        Raises FeedError if a name, a number type or a shape does not fit the inputs, or if a value differs from the one
        that its input was bound to.
        """
        return {name: on_host(feed) for name, feed in self.take(feeds, copy).items()}

    def take(
        self, feeds: Mapping[str, npt.ArrayLike], copy: bool = False, on_gpus: Collection[str] = ()
    ) -> dict[str, Feed]:
        """As `on_host`, but arrays on GPUs stay there if they are for one of the inputs `on_gpus`."""
        if not isinstance(feeds, Mapping):
            raise FeedError(f"feeds are arrays by the names of inputs, as in a dict, not {type(feeds).__name__}")
        if self._fixed:
            feeds = self._without_fixed(feeds)
        if missing := [name for name in self._needed if name not in feeds]:
            raise FeedError(
                f"no array for the input{'s' * (len(missing) > 1)} {first_few(missing)}; the model takes "
                f"{_list(self._inputs)}"
            )
        if extra := [str(name) for name in feeds if name not in self._wanted]:
            also = f", and may be given {_list(self._optional)}" if self._optional else ""
            raise FeedError(f"the model has no input {', '.join(extra)}; it takes {_list(self._inputs)}{also}")
        taken = {
            name: wanted.read(feeds[name], name in on_gpus) for name, wanted in self._wanted.items() if name in feeds
        }
        for name, feed in taken.items():
            self._wanted[name].check(feed)
        if not copy:
            return taken
        # When all have been checked. A copy on a GPU is complete: whoever made the feed may write to it afterwards.
        return {name: feed.copy() for name, feed in taken.items()}

    def _without_fixed(self, feeds: Mapping[str, npt.ArrayLike]) -> Mapping[str, npt.ArrayLike]:
        for name, tensor in self._fixed.items():
            if name in feeds:
                _check_fixed(feeds[name], tensor)
        return {name: feed for name, feed in feeds.items() if name not in self._fixed}


class _Wanted:
    """The requirements for the feeds of one input."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._dtype = number_type(tensor.dtype)
        self._axes = None if tensor.shape is None else len(tensor.shape)
        self._sizes = [(axis, size) for axis, size in enumerate(tensor.shape or ()) if isinstance(size, int)]

    def read(self, feed: npt.ArrayLike, on_gpu: bool) -> Feed:
        """The feed as an array. Raw bytes, as numpy's files have for types that numpy lacks, get the input's type."""
        if type(feed) is np.ndarray and feed.dtype == self._dtype:
            return feed
        try:
            if is_on_gpu(feed):
                on_its_gpu = read_gpu_feed(feed)
                return on_its_gpu if on_gpu else on_its_gpu.on_host()
            array = read_tensor(feed) if is_tensor(feed) else np.asarray(feed)
        except Exception as error:  # whatever the object's own conversion raises
            raise FeedError(f"the feed of '{self._tensor.name}' can't be converted to an array: {error}") from error
        # isbuiltin is 1 for numpy's own types.
        if array.dtype == f"V{self._dtype.itemsize}" and self._dtype.isbuiltin != 1:
            return array.view(self._dtype)
        return array

    def check(self, array: Feed) -> None:
        """Raise FeedError unless the array fits the input."""
        tensor, shape = self._tensor, array.shape
        if array.dtype != self._dtype:
            given = f"{array.dtype}"
            if given.startswith(">"):
                given = f"in the other byte order ({given})"
            raise FeedError(f"input '{tensor.name}' is {given}, and the model takes {tensor.dtype}")
        fits = self._axes is None or len(shape) == self._axes
        for axis, size in self._sizes:
            fits = fits and shape[axis] == size
        if not fits:
            raise FeedError(
                f"input '{tensor.name}' has shape {format_shape(shape)}, and the model takes "
                f"{format_shape(tensor.shape or ())}"
            )
        low, high = tensor.min_shape, tensor.max_shape
        if low and high and any(not a <= size <= b for a, size, b in zip(low, shape, high, strict=False)):
            raise FeedError(
                f"input '{tensor.name}' has shape {format_shape(shape)}, and the engines were built for "
                f"{format_shape(low)} to {format_shape(high)} (--min-shapes and --max-shapes of 'splitc compile')"
            )


def _check_fixed(feed: npt.ArrayLike, fixed: FixedInput) -> None:
    """Raise FeedError unless the feed fits a fixed input."""
    wanted = _Wanted(Tensor(fixed.name, fixed.dtype, fixed.shape))
    array = wanted.read(feed, on_gpu=fixed.value is None)
    wanted.check(array)
    if fixed.value is not None and not np.array_equal(on_host(array), np.asarray(fixed.value).astype(array.dtype)):
        raise FeedError(
            f"input '{fixed.name}' is {on_host(array).tolist()}, and the package was compiled with {fixed.value}: "
            "leave it out, or compile again with another --set"
        )


def _list(inputs: Sequence[Tensor]) -> str:
    return first_few([f"{tensor.name} ({tensor.dtype}, {format_shape(tensor.shape)})" for tensor in inputs])
