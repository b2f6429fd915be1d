"""A model's `config.pbtxt`, from a package's manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from splitc.runtime.errors import MisuseError
from splitc.runtime.manifest import Tensor
from splitc.runtime.serving.interface import Interface

# Triton's names of number types. It hands no bfloat16 to numpy, and knows no float8.
TYPES = {
    "bool": "TYPE_BOOL",
    **{f"{kind}{bits}": f"TYPE_{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
}


def model_config(
    name: str, interface: Interface, *, rows: int = 0, idle_seconds: float | None = None, most_sequences: int = 0
) -> str:
    """The text of `config.pbtxt`.

    With `rows` above 0 the server joins requests to batches of so many rows. `idle_seconds` makes requests sequences,
    of which at most `most_sequences` are open. Raises MisuseError for a tensor that Triton can't have.
    """
    lines = [f"name: {_quoted(name)}", 'backend: "python"', f"max_batch_size: {rows}"]
    for kind, tensors, optional in (
        ("input", interface.inputs, False),
        ("input", interface.optional, True),
        ("output", interface.outputs, False),
    ):
        lines += [f"{kind} {{ {_tensor(each, rows > 0, optional)} }}" for each in tensors]
    if idle_seconds is not None:
        idle = f"max_sequence_idle_microseconds: {round(1e6 * idle_seconds)}"
        lines.append(f"sequence_batching {{ {idle} oldest {{ max_candidate_sequences: {most_sequences} }} }}")
    elif rows:
        lines.append("dynamic_batching { }")
    # One instance: a session has its own ranks on all devices, and takes many requests at a time.
    lines.append("instance_group { kind: KIND_CPU count: 1 }")
    return "\n".join(lines) + "\n"


def _tensor(tensor: Tensor, in_batch: bool, optional: bool) -> str:
    if tensor.dtype not in TYPES:
        raise MisuseError(
            f"'{tensor.name}' is {tensor.dtype}, which Triton's Python backend does not exchange: export a model whose "
            "inputs and outputs are float16 or float32"
        )
    if tensor.shape is None:
        raise MisuseError(f"'{tensor.name}' may have any number of dimensions, and Triton wants a number of them")
    dims = ", ".join(_dimensions(tensor.shape[1:] if in_batch else tensor.shape))
    # Triton has no scalars: one is an array of one element.
    text = f"name: {_quoted(tensor.name)} data_type: {TYPES[tensor.dtype]} dims: [ {dims or 1} ]"
    return f"{text} optional: true" if optional else text


def _dimensions(shape: Sequence[int | str | None]) -> Iterator[str]:
    for size in shape:
        yield str(size) if isinstance(size, int) else "-1"


def _quoted(text: str) -> str:
    """A string of protobuf's text form, which has the escapes of JSON's (but for \\u)."""
    return json.dumps(text, ensure_ascii=False)
