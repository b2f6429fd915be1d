"""The capacity of a language model: how many tokens its inputs and caches take, as far as the manifest knows."""

from __future__ import annotations

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.signature import LanguageSignature
from splitc.runtime.package.manifest import Manifest, Tensor
from splitc.runtime.units import whole_number

# Tokens to generate, unless the caller says how many. A choice: a paragraph.
USUAL = 100
# Tokens of a sequence at most on servers, where the package knows no limit. A choice, which --context replaces.
USUAL_CONTEXT = 4096


def find_capacity(manifest: Manifest, signature: LanguageSignature) -> int | None:
    """The most tokens that one sequence can read; None if nothing in the manifest limits them.

    A mask may have a fixed length, a table may end the positions, and engines may be built for a range of lengths.
    """
    inputs = {tensor.name: tensor for tensor in manifest.inputs}
    ids = inputs[signature.ids]
    ends: list[int | None] = []
    if signature.mask is not None and inputs[signature.mask].shape != ids.shape:
        ends.append(_longest(inputs[signature.mask], -1))
    if signature.positions is not None and (role := inputs[signature.positions].role) is not None:
        ends.append(role.rows or None)
    if not manifest.states and ids.max_shape is not None:
        ends.append(ids.max_shape[1])
    for state in manifest.states:
        longest = None if state.grows is None else _longest(inputs[state.input], state.grows)
        # A cache that an engine makes anew is read without the newest token.
        ends.append(longest if longest is None or state.in_place else longest + 1)
    return min((end for end in ends if end is not None), default=None)


def _longest(tensor: Tensor, axis: int) -> int | None:
    """The largest size of the tensor along an axis; None if there is no limit."""
    size = None if tensor.shape is None else tensor.shape[axis]
    if isinstance(size, int):
        return size
    return None if tensor.max_shape is None else tensor.max_shape[axis]


def count_tokens(manifest: Manifest, signature: LanguageSignature, prompt: int, asked: int | None) -> int:
    """The number of tokens to generate: `asked`, or by default USUAL, or fewer if the capacity ends.

    The last one is not read again. Raises MisuseError for a number below 0, and for more than the capacity.
    """
    if asked is not None:
        asked = whole_number("--max-new-tokens", asked, 0, of=" of tokens")
    capacity = find_capacity(manifest, signature)
    if capacity is None:
        return USUAL if asked is None else asked
    most = capacity - prompt + 1
    if most < 1:
        raise MisuseError(f"the model has room for {capacity} tokens, and the prompt has {prompt}")
    if asked is not None and asked > most:
        raise MisuseError(
            f"the model has room for {capacity} tokens, and {prompt} of the prompt and {asked} new ones need "
            f"{prompt + asked - 1} (the last one is not read again): ask for {most} at most"
        )
    return min(USUAL, most) if asked is None else asked
