"""Check feeds against a model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.arrays.torch_tensors import is_tensor, read_tensor
from splitc.runtime.errors import EngineError, FeedError, SizesError
from splitc.runtime.feeds.on_gpu import Feed, is_on_gpu, on_host, read_gpu_feed
from splitc.runtime.package.manifest import FixedInput, Manifest, Tensor
from splitc.runtime.units import first_few, format_shape


def check_feeds(
    feeds: Mapping[str, npt.ArrayLike],
    inputs: Sequence[Tensor],
    optional: Sequence[Tensor] = (),
    fixed: Sequence[FixedInput] = (),
    copy: bool = False,
) -> dict[str, Array]:
    """The feeds as arrays on the host; with `copy` as new ones, which the caller can't change.

    Feeds for `optional` inputs may be missing. Those for `fixed` inputs, which the package does not have, are checked
    and left out. Raises FeedError if a name, a number type or a shape does not fit the inputs, or if a value differs
    from the one that its input was bound to.
    """
    taken = take_feeds(feeds, inputs, optional, fixed, copy)
    return {name: on_host(feed) for name, feed in taken.items()}


def take_feeds(
    feeds: Mapping[str, npt.ArrayLike],
    inputs: Sequence[Tensor],
    optional: Sequence[Tensor] = (),
    fixed: Sequence[FixedInput] = (),
    copy: bool = False,
    on_gpus: Collection[str] = (),
) -> dict[str, Feed]:
    """As `check_feeds`, but arrays on GPUs stay there if they are for one of the inputs `on_gpus`."""
    if not isinstance(feeds, Mapping):
        raise FeedError(f"feeds are arrays by the names of inputs, as in a dict, not {type(feeds).__name__}")
    if bound := [tensor for tensor in fixed if tensor.name in feeds]:
        for tensor in bound:
            _check_fixed(feeds[tensor.name], tensor)
        left_out = {tensor.name for tensor in bound}
        feeds = {name: feed for name, feed in feeds.items() if name not in left_out}
    known = {tensor.name: tensor for tensor in (*optional, *inputs)}
    if missing := [tensor.name for tensor in inputs if tensor.name not in feeds]:
        raise FeedError(
            f"no array for the input{'s' * (len(missing) > 1)} {first_few(missing)}; the model takes {_list(inputs)}"
        )
    if extra := [str(name) for name in feeds if name not in known]:
        also = f", and may be given {_list(optional)}" if optional else ""
        raise FeedError(f"the model has no input {', '.join(extra)}; it takes {_list(inputs)}{also}")
    taken = {name: _read(feeds[name], tensor, name in on_gpus) for name, tensor in known.items() if name in feeds}
    for name, feed in taken.items():
        _check_array(feed, known[name])
    if not copy:
        return taken
    # Here, when all have been checked. A copy on a GPU is complete: whoever made the feed may write to it afterwards.
    return {name: feed.copy() for name, feed in taken.items()}


def _read(feed: npt.ArrayLike, tensor: Tensor, on_gpu: bool) -> Feed:
    """The feed as an array. Raw bytes, as numpy's files have for types that numpy lacks, get the input's type."""
    try:
        if is_on_gpu(feed):
            on_its_gpu = read_gpu_feed(feed)
            return on_its_gpu if on_gpu else on_its_gpu.on_host()
        array = read_tensor(feed) if is_tensor(feed) else np.asarray(feed)
    except Exception as error:  # whatever the object's own conversion raises
        raise FeedError(f"the feed of '{tensor.name}' can't be converted to an array: {error}") from error
    if array.dtype.type is np.void and array.dtype.itemsize == number_type(tensor.dtype).itemsize:
        return array.view(number_type(tensor.dtype))
    return array


def _check_fixed(feed: npt.ArrayLike, fixed: FixedInput) -> None:
    """Raise FeedError unless the feed fits an input that the package has not."""
    tensor = Tensor(fixed.name, fixed.dtype, fixed.shape)
    array = _read(feed, tensor, on_gpu=fixed.value is None)
    _check_array(array, tensor)
    if fixed.value is not None and not np.array_equal(on_host(array), np.asarray(fixed.value).astype(array.dtype)):
        raise FeedError(
            f"input '{fixed.name}' is {on_host(array).tolist()}, and the package was compiled with {fixed.value}: "
            "leave it out, or compile again with another --set"
        )


def _check_array(array: Feed, tensor: Tensor) -> None:
    """Raise FeedError unless the array fits the input."""
    if array.dtype != number_type(tensor.dtype):
        raise FeedError(f"input '{tensor.name}' is {array.dtype}, and the model takes {tensor.dtype}")
    want = array.shape if tensor.shape is None else tensor.shape
    if array.ndim != len(want) or any(
        isinstance(w, int) and size != w for size, w in zip(array.shape, want, strict=True)
    ):
        have = format_shape(array.shape)
        raise FeedError(f"input '{tensor.name}' has shape {have}, and the model takes {format_shape(want)}")
    low, high = tensor.min_shape, tensor.max_shape
    if low and high and any(not a <= size <= b for a, size, b in zip(low, array.shape, high, strict=False)):
        raise FeedError(
            f"input '{tensor.name}' has shape {format_shape(array.shape)}, and the engines were built for "
            f"{format_shape(low)} to {format_shape(high)} (--min-shapes and --max-shapes of 'splitc compile')"
        )


def two_sizes(arrays: Mapping[str, Feed], inputs: Sequence[Tensor], symbols: Collection[str] | None = None) -> str:
    """How the arrays contradict the model's symbolic sizes; empty if they don't.

    Checks these `symbols` only; all if None. Two sizes for one symbol need not be wrong: exporters give one name to
    sizes that a model never compares.
    """
    sizes_of: dict[str, tuple[int, str]] = {}
    for tensor in inputs:
        sizes = arrays[tensor.name].shape if tensor.name in arrays else ()
        for symbol, size in zip(tensor.shape or (), sizes, strict=False):
            if isinstance(symbol, str) and (symbols is None or symbol in symbols):
                known, other = sizes_of.setdefault(symbol, (size, tensor.name))
                if known != size:
                    return f"'{symbol}' is {known} in the input '{other}' and {size} in '{tensor.name}'"
    for symbol, (size, name) in sizes_of.items():
        terms = symbol.split(" + ")
        total = sum(sizes_of[term][0] for term in terms if term in sizes_of)
        if len(terms) > 1 and all(term in sizes_of for term in terms) and total != size:
            return f"'{symbol}' is {total} by the other inputs and {size} in '{name}'"
    return ""


def check_sizes(arrays: Mapping[str, Feed], manifest: Manifest) -> None:
    """Raise FeedError if a size that ranks read off any input which has it is not the same in all of them."""
    if manifest.shared_sizes and (said := two_sizes(arrays, manifest.inputs, manifest.shared_sizes)):
        raise FeedError(f"{said}: this package treats them as one size, since the model gives them one name")


def explain_failure(error: BaseException, arrays: Mapping[str, Feed], inputs: Sequence[Tensor]) -> BaseException:
    """The error of a request; a SizesError if an engine failed on arrays that contradict the model's names of sizes."""
    if not isinstance(error, EngineError) or not (said := two_sizes(arrays, inputs)):
        return error
    explained = SizesError(f"{said}, and the model takes no such sizes together: {error}")
    explained.__cause__ = error
    return explained


def _list(inputs: Sequence[Tensor]) -> str:
    return first_few([f"{tensor.name} ({tensor.dtype}, {format_shape(tensor.shape)})" for tensor in inputs])
