"""A model's `config.pbtxt`, from a package's manifest."""

from __future__ import annotations

import json

from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Manifest, Tensor
from splitc.runtime.serving.interface import Interface, find_interface, public_form


def model_config(
    name: str,
    interface: Interface,
    *,
    rows: int = 0,
    idle_seconds: float | None = None,
    most_sequences: int = 0,
    on_gpus: bool = False,
) -> str:
    """The text of `config.pbtxt`.

    - `rows`: if above 0, the server joins requests into batches of up to this many rows.
    - `idle_seconds`: makes requests sequences, of which at most `most_sequences` are open.
    - `on_gpus`: inputs that the server has on a GPU stay there.

    Raises MisuseError for a tensor that clients can't send or get.
    """
    lines = tensor_lines(interface, rows > 0)
    if idle_seconds is not None:
        idle = f"max_sequence_idle_microseconds: {round(1e6 * idle_seconds)}"
        lines.append(f"sequence_batching {{ {idle} oldest {{ max_candidate_sequences: {most_sequences} }} }}")
    elif rows:
        lines.append("dynamic_batching { }")
    if on_gpus:
        lines.append('parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }')
    # One instance: a session has its own ranks on all devices, and takes many requests at a time.
    lines.append("instance_group { kind: KIND_CPU count: 1 }")
    return config_text(name, 'backend: "python"', *lines, rows=rows)


def config_text(name: str, runner: str, *lines: str, rows: int = 0) -> str:
    """The text of a config: the model's name, what runs it, the most rows of a batch, and other lines."""
    return "\n".join([f"name: {quoted(name)}", runner, f"max_batch_size: {rows}", *lines, ""])


def tensor_lines(interface: Interface, in_batch: bool = False) -> list[str]:
    """A line for each input and output. With `in_batch`, Triton adds the batch as the first axis."""
    return [
        *(f"input {{ {_tensor(tensor, in_batch, False)} }}" for tensor in interface.inputs),
        *(f"input {{ {_tensor(tensor, in_batch, True)} }}" for tensor in interface.optional),
        *(f"output {{ {_tensor(tensor, in_batch, False)} }}" for tensor in interface.outputs),
    ]


def native_lines(manifest: Manifest, option: str) -> list[str]:
    """The lines for a model of Triton's own backends, of which `option` chose one: without optional inputs.

    Raises MisuseError for tensors that these can't have.
    """
    interface = find_interface(manifest, sequences=False)
    names = {tensor.name for tensor in interface.inputs}
    for tensor in (*interface.inputs, *interface.outputs):
        if tensor.shape == []:
            raise MisuseError(
                f"'{tensor.name}' is a scalar, which Triton's own backends can't have: leave out {option}"
            )
    if passed := [tensor.name for tensor in interface.outputs if tensor.name in names]:
        raise MisuseError(
            f"'{passed[0]}' is an input and an output, which Triton's own backends can't have: leave out {option}"
        )
    return tensor_lines(Interface(interface.inputs, [], interface.outputs))


def _tensor(tensor: Tensor, in_batch: bool, optional: bool) -> str:
    datatype, shape = public_form(tensor)
    dims = ", ".join(map(str, shape[1:] if in_batch else shape))
    text = f"name: {quoted(tensor.name)} data_type: TYPE_{datatype} dims: [ {dims} ]"
    return f"{text} optional: true" if optional else text


def quoted(text: str) -> str:
    """A string in protobuf's text format, whose escapes are JSON's (but for \\u)."""
    return json.dumps(text, ensure_ascii=False)
