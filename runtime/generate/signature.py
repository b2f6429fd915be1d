"""What makes a model a language model: token ids go in, perhaps with a mask and positions, and logits come out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from splitc.runtime.errors import MisuseError
from splitc.runtime.manifest import Manifest, Tensor


@dataclass(frozen=True)
class LanguageSignature:
    """The names of a language model's inputs and of its logits. Some models have no mask or positions.

    `handed` are further inputs, which stay as another package made them when it read the prompt, with its outputs.
    """

    ids: str
    mask: str | None
    positions: str | None
    logits: str
    handed: Mapping[str, str] = field(default_factory=dict)


def find_signature(manifest: Manifest, prefill: Manifest | None = None) -> LanguageSignature:
    """Find the inputs of a language model and its logits, by their roles: token ids are the indices.

    `prefill` is the package that reads the prompt, if it is another one. Raises MisuseError for a model with other
    inputs.
    """
    handed = {} if prefill is None else find_handed(manifest, {tensor.name for tensor in prefill.outputs})
    states = {state.input for state in manifest.states}
    given = {state.output for state in manifest.states}
    inputs = [tensor for tensor in manifest.inputs if tensor.name not in states | handed.keys()]
    masks, positions, ids = (_of_role(inputs, role) for role in ("mask", "positions", "indices"))
    rest = [tensor for tensor in inputs if tensor not in (*masks, *positions)]
    ids = ids or [tensor for tensor in rest if "ids" in tensor.name.lower()]
    if len(ids) != 1 or len(rest) > 1 or len(masks) > 1 or len(positions) > 1 or not may_have(ids[0], 2):
        raise MisuseError(
            f"can't generate with {manifest.source.name}: it takes {', '.join(tensor.name for tensor in inputs)}, and "
            "splitc knows token ids, an attention mask and position ids (and states)"
        )
    outputs = [tensor for tensor in manifest.outputs if tensor.name not in given and may_have(tensor, 3)]
    named = [tensor for tensor in outputs if "logits" in tensor.name.lower()] or outputs
    if not named:
        raise MisuseError(f"can't generate with {manifest.source.name}: it has no output of logits")
    return LanguageSignature(ids[0].name, _one(masks), _one(positions), named[0].name, handed)


def find_handed(manifest: Manifest, made: Collection[str]) -> dict[str, str]:
    """The inputs that are no states and that outputs of another model, `made`, are for: of the same name, or named
    as the model's own states are. If past.0.self becomes present.0.self, then present.0.cross is for past.0.cross.
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
    """Two names without the end that they have in common."""
    while first and second and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    return first, second


def _of_role(inputs: Sequence[Tensor], role: str) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor.role is not None and tensor.role.kind == role]


def may_have(tensor: Tensor, dimensions: int) -> bool:
    """Whether the tensor can have so many dimensions."""
    return tensor.shape is None or len(tensor.shape) == dimensions


def _one(tensors: Sequence[Tensor]) -> str | None:
    return tensors[0].name if tensors else None
