"""The inputs and outputs of a served package, as a server's clients see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Manifest, Tensor

# Names of number types in the open inference protocol (KServe v2).
TYPES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a served package; with sequences, without states."""

    inputs: Sequence[Tensor]
    optional: Sequence[Tensor]
    outputs: Sequence[Tensor]


def find_interface(manifest: Manifest, sequences: bool) -> Interface:
    """The tensors that clients send and receive. Raises MisuseError for sequences of a model without states."""
    if sequences and not manifest.states:
        raise MisuseError(
            f"{manifest.source.name} has no states, so its requests can't be sequences: leave out --sequences"
        )
    kept_inputs = {state.input for state in manifest.states if sequences}
    kept_outputs = {state.output for state in manifest.states if sequences}
    return Interface(
        [tensor for tensor in manifest.inputs if tensor.name not in kept_inputs],
        manifest.optional,
        [tensor for tensor in manifest.outputs if tensor.name not in kept_outputs],
    )


def public_form(tensor: Tensor) -> tuple[str, list[int]]:
    """The type and the shape that clients see, -1 for a size that is free. A scalar is an array of one element.

    Raises MisuseError for a tensor that clients can't send or get.
    """
    if tensor.dtype not in TYPES:
        raise MisuseError(
            f"'{tensor.name}' is {tensor.dtype}, which servers can't exchange: export a model whose inputs "
            "and outputs are float16 or float32"
        )
    if tensor.shape is None:
        raise MisuseError(f"'{tensor.name}' may have any number of dimensions, and servers need a fixed one")
    return TYPES[tensor.dtype], [size if isinstance(size, int) else -1 for size in tensor.shape] or [1]


def why_not_batched(manifest: Manifest, interface: Interface) -> str | None:
    """Why requests can't be batched; None if they can.

    They can be where the rows of the batch do not meet, and it is the free first one of several axes of all inputs and
    outputs.
    """
    if manifest.batch is None:
        return "their rows are not independent"
    if interface.optional or not interface.inputs:
        return "some inputs may be left out" if interface.optional else "they have no inputs"
    for tensor in (*interface.inputs, *interface.outputs):
        shape = tensor.shape or []
        if manifest.batch.get(tensor.name) != 0 or len(shape) < 2 or isinstance(shape[0], int):
            return f"the batch is not the first, dynamic axis of '{tensor.name}', with more axes behind it"
    return None


def find_rows(manifest: Manifest, interface: Interface) -> int | None:
    """The most rows of a batch of requests; 0 for any number, None if requests can't be batched."""
    if why_not_batched(manifest, interface) is not None:
        return None
    return min((tensor.max_shape[0] for tensor in interface.inputs if tensor.max_shape), default=0)
