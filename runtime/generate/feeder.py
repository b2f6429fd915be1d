"""A prompt's tokens as a language model takes them, and the feeds of its requests."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from numbers import Integral

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.signature import TokenInputs, may_have
from splitc.runtime.package.manifest import Manifest, Shape, Tensor
from splitc.runtime.units import format_shape, whole_number


def check_tokens(manifest: Manifest, inputs: TokenInputs, prompt: npt.ArrayLike) -> list[int]:
    """The prompt's tokens. Raises MisuseError if there are none, or some that the model does not know."""
    array = np.asarray(prompt, object)
    if not array.size:
        raise MisuseError("the prompt has no tokens")
    wrong = [token for token in array.flat if not isinstance(token, Integral) or isinstance(token, bool)]
    if array.ndim != 1 or wrong:
        what = f"has {reprlib.repr(wrong[0])}" if array.ndim == 1 else f"is an array of shape {list(array.shape)}"
        raise MisuseError(f"a prompt is a list of token ids, and this one {what}")
    tokens = list(map(int, array))
    ids = next(tensor for tensor in manifest.inputs if tensor.name == inputs.ids)
    vocabulary, dtype = ids.role.rows if ids.role is not None else 0, number_type(ids.dtype)
    end = vocabulary or (np.iinfo(dtype).max + 1 if dtype.kind in "iu" else None)
    if unknown := [token for token in tokens if token < 0 or (end is not None and token >= end)]:
        limit = f"has a vocabulary of {vocabulary}" if vocabulary else f"takes numbers from 0, of type {dtype}"
        raise MisuseError(f"the prompt has the token {unknown[0]}, and the model {limit}")
    return tokens


# Added to scores, hides them: the lowest number of half precision.
HIDING = -65504.0
# The numbers of a token's position where a model has several and does not say how many: time, row and column.
ROWS = 3


class Feeder:
    """Makes the feeds of one step, in the number types of the model's inputs."""

    def __init__(self, manifest: Manifest, signature: TokenInputs) -> None:
        self.signature = signature
        self._inputs = {tensor.name: tensor for tensor in manifest.inputs}
        self._kept = manifest.kept_rows

    def chunk(self, prompt: int, wanted: int) -> int:
        """The number of prompt tokens in one run.

        Raises MisuseError if `wanted` is not a valid number of tokens, and for a model with a fixed length above 1.
        """
        wanted = whole_number("--prompt-chunk", wanted, 1, of=" of tokens")
        ids = self._inputs[self.signature.ids]
        fixed = None if ids.shape is None else ids.shape[1]
        if isinstance(fixed, int) and fixed != 1:
            raise MisuseError(f"can't generate with a model that takes exactly {fixed} tokens at a time")
        most = prompt if ids.max_shape is None else ids.max_shape[1]
        return 1 if fixed == 1 else max(1, min(wanted, prompt, most))

    def feeds(self, new: Sequence[int], total: int) -> dict[str, Array]:
        """The feeds for `new` tokens, the last ones of `total`. Of several, only the last one's logits are computed."""
        feeds = {self.signature.ids: np.array([new])}
        if self.signature.mask is not None:
            mask = self._inputs[self.signature.mask]
            seen = self._mask(mask, len(new), total)
            hides = mask.role is not None and mask.role.kind == "padding"
            feeds[mask.name] = 1 - seen.astype(np.int8) if hides else seen
        if self.signature.positions is not None:
            shape = self._inputs[self.signature.positions].shape
            feeds[self.signature.positions] = _positions(shape, np.arange(total - len(new), total))
        own = {name: array.astype(self._inputs[name].dtype) for name, array in feeds.items()}
        return own if self._kept is None or len(new) == 1 else {**own, self._kept.input: np.array([len(new) - 1])}

    def _mask(self, tensor: Tensor, new: int, total: int) -> Array:
        """Ones for the tokens so far, and zeros up to a fixed length; or what is added to scores: see `_bias`.

        Raises MisuseError for a mask of another form, and for a sequence that exceeds the length.
        """
        is_bias = tensor.role is not None and tensor.role.kind == "bias"
        if not may_have(tensor, 4 if is_bias else 2):
            raise MisuseError(f"can't generate with a mask of {format_shape(tensor.shape)} ('{tensor.name}')")
        length = None if tensor.shape is None else tensor.shape[-1]
        ids = self._inputs[self.signature.ids]
        if tensor.shape == ids.shape and length is not None:
            return np.ones((1, new))
        room = length if isinstance(length, int) else total
        if total > room:
            raise MisuseError(f"the model has room for {room} tokens, and the sequence comes to {total}")
        return _bias(new, total, room) if is_bias else (np.arange(room) < total)[None]


def _positions(shape: Shape | None, places: Array) -> Array:
    """Positions of text in an input's shape: the first token's, or [tokens], [1, tokens], or [rows, 1, tokens].

    Models that also read images have several numbers for a token, which are the same in text (M-RoPE of Qwen-VL).
    """
    axes = 2 if shape is None else len(shape)
    if axes < 2:
        return places if axes else places[0]
    rows = [size if isinstance(size, int) else ROWS for size in (shape or ())[:-2]]
    return np.broadcast_to(places, (*rows, 1, len(places)))


def _bias(new: int, total: int, room: int) -> Array:
    """Zeros for what each token sees, and the lowest number for later tokens, [1, 1, new, room]."""
    seen = np.arange(room) <= np.arange(total - new, total)[:, None]
    return np.where(seen, 0, HIDING)[None, None]
