"""The tokens of a prompt, as a model takes them."""

from __future__ import annotations

import reprlib
from numbers import Integral

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.signature import TokenInputs
from splitc.runtime.package.manifest import Manifest


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
