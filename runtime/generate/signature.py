"""A language model by its inputs and outputs: token ids, perhaps a mask and positions, and logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Manifest, Tensor, of_role
from splitc.runtime.units import shortened


@dataclass(frozen=True)
class TokenInputs:
    """The names of a model's inputs that are computed from tokens. Some models have no mask or positions.

    `handed` maps further inputs to outputs of the package that read the prompt; they do not change later.
    """

    ids: str
    mask: str | None
    positions: str | None
    handed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LanguageSignature(TokenInputs):
    """The names of a language model's inputs, and of its logits."""

    logits: str


def find_signature(manifest: Manifest, prefill: Manifest | None = None) -> LanguageSignature:
    """Find the inputs of a language model and its logits.

    `prefill` is the package that reads the prompt, if it is another one. Raises MisuseError for a model with other
    inputs, and for one without logits.
    """
    inputs = find_token_inputs(manifest, prefill)
    given = {state.output for state in manifest.states}
    others = [tensor.name for tensor in manifest.outputs if tensor.name not in given]
    logits = [tensor.name for tensor in find_logits(manifest) if tensor.name not in given]
    if not logits:
        raise MisuseError(
            f"can't generate with {manifest.source.name}: none of its outputs ({', '.join(others)}) is its logits, "
            "which are named so or have a column for each row of the tokens' table"
        )
    return LanguageSignature(inputs.ids, inputs.mask, inputs.positions, inputs.handed, logits=logits[0])


def find_token_inputs(manifest: Manifest, prefill: Manifest | None = None) -> TokenInputs:
    """Find the inputs of a model that are made of tokens, by their roles: token ids are the indices.

    See `find_signature`.
    """
    handed = {} if prefill is None else find_handed(manifest, {tensor.name for tensor in prefill.outputs})
    states = {state.input for state in manifest.states}
    inputs = [tensor for tensor in manifest.inputs if tensor.name not in states | handed.keys()]
    masks, positions, ids = (of_role(inputs, role) for role in ("mask", "positions", "indices"))
    masks = [*masks, *of_role(inputs, "padding"), *of_role(inputs, "bias")]
    rest = [tensor for tensor in inputs if tensor not in (*masks, *positions)]
    ids = ids or [tensor for tensor in rest if "ids" in tensor.name.lower()]
    if len(ids) != 1 or len(rest) > 1 or len(masks) > 1 or len(positions) > 1 or not may_have(ids[0], 2):
        raise MisuseError(
            f"can't generate with {manifest.source.name}: it takes {', '.join(tensor.name for tensor in inputs)}, and "
            "splitc knows token ids, an attention mask and position ids (and states). One that has the same value in "
            "all requests can be bound when the model is compiled (--set NAME=VALUE)"
        )
    return TokenInputs(ids[0].name, _one(masks), _one(positions), handed)


def find_logits(manifest: Manifest) -> list[Tensor]:
    """The outputs that may be logits: those with such a name, or with as many columns as the model knows tokens."""
    rows = {tensor.role.rows for tensor in of_role(manifest.inputs, "indices") if tensor.role is not None}
    outputs = [tensor for tensor in manifest.outputs if may_have(tensor, 3)]
    named = [tensor for tensor in outputs if "logits" in tensor.name.lower()]
    return named or [tensor for tensor in outputs if tensor.shape is not None and tensor.shape[-1] in rows]


def need_tokens(manifest: Manifest, logits: str, tokens: Collection[int]) -> None:
    """Raise MisuseError for stop tokens beyond the vocabulary, by the shape of the model's logits."""
    if not isinstance(tokens, Collection) or not all(isinstance(token, Integral) for token in tokens):
        raise MisuseError(f"the tokens to end at are a list of token ids, as in [2], not {shortened(repr(tokens))}")
    shape = next(tensor.shape for tensor in manifest.outputs if tensor.name == logits)
    vocabulary = None if shape is None else shape[-1]
    end = vocabulary if isinstance(vocabulary, int) else math.inf
    if strange := [token for token in tokens if not 0 <= token < end]:
        known = "token ids count from 0" if end == math.inf else f"they are 0 to {end - 1}"
        raise MisuseError(f"the end token {strange[0]} is none of the model's tokens: {known}")


def find_handed(manifest: Manifest, made: Collection[str]) -> dict[str, str]:
    """The inputs, other than states, that take one of another model's outputs `made`: by the same name, or by names
    that differ as those of the states do. If past.0.self takes present.0.self, then past.0.cross takes present.0.cross.
    """
    renamed = {_without_end(state.input, state.output) for state in manifest.states} | {("", "")}
    states = {state.input for state in manifest.states}
    return {
        tensor.name: output
        for tensor in manifest.inputs
        for past, present in sorted(renamed)
        if tensor.name not in states
        and tensor.name.startswith(past)
        and (output := present + tensor.name.removeprefix(past)) in made
    }


def _without_end(first: str, second: str) -> tuple[str, str]:
    """Two names without their common suffix."""
    while first and second and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    return first, second


def may_have(tensor: Tensor, dimensions: int) -> bool:
    """Whether the tensor can have so many dimensions."""
    return tensor.shape is None or len(tensor.shape) == dimensions


def _one(tensors: Sequence[Tensor]) -> str | None:
    return tensors[0].name if tensors else None
