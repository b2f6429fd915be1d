"""Read a model's file lazily, and check that it is one, and all there."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from splitc.compiler.errors import ModelError


def load_model(path: Path) -> ir.Model:
    """Read a model; its weights stay on disk, and are known to be there, whole.

    Raises ModelError when the file is missing or no ONNX model, for a name that stands for two things, for weights that
    are sparse, and for external data that are missing, too short or outside the model's folder.
    """
    if not path.is_file():
        raise ModelError(f"no such model file: {path}")
    try:
        proto = onnx.load(path, load_external_data=False)
    except (google.protobuf.message.DecodeError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is not an ONNX model ({error})") from error
    if not proto.graph.output or not proto.opset_import:
        raise ModelError(f"{path} is not an ONNX model (it has no graph outputs)")
    _check_names(proto.graph, path, {})
    try:
        model = ir.from_proto(proto)
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ModelError(f"{path} is not a valid ONNX model: {reason}") from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    check_external_data(model, path)
    _trust_external_data(model)
    return model


def _check_names(graph: onnx.GraphProto, path: Path, outside: Collection[str]) -> None:
    """Raise ModelError for a name that stands for two things: some tools take the one then, some the other.

    An input may have a default, and of a weight that is there twice the last counts, as in ONNX Runtime. `outside` are
    the names of the graphs around this one.
    """
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(f"{path}: the weight '{name}' is a sparse tensor, which splitc does not read: make it dense")
    weights = {tensor.name for tensor in graph.initializer}
    made = Counter(name for node in graph.node for name in node.output if name)
    given = weights | {value.name for value in graph.input}
    twice = [name for name, count in made.items() if count > 1 or name in given] + sorted(weights & set(outside))
    if twice:
        raise ModelError(f"{path}: '{twice[0]}' is the name of two values in '{graph.name}': give one of them another")
    names = {*outside, *given, *made}
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
            _check_names(inner, path, names)


def initializers(model: ir.Model) -> Iterator[ir.Value]:
    """The initializers of the model's graph and of all subgraphs."""
    return itertools.chain.from_iterable(graph.initializers.values() for graph in model.graphs())


def check_external_data(model: ir.Model, path: Path) -> None:
    """Raise ModelError unless each external tensor lies, whole, in a file below the model's folder."""
    folder = path.parent.resolve()
    sizes: dict[str, int] = {}
    for value in initializers(model):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        location = str(tensor.location)
        if location not in sizes:
            file = (folder / location).resolve()
            # A model is data from elsewhere: it must not make us copy /etc/passwd into a package.
            if not file.is_relative_to(folder):
                raise ModelError(f"{path}: weight '{value.name}' lies in '{location}', outside the model's folder")
            if not file.is_file():
                raise ModelError(f"{path}: the external data file {file} is missing (it holds weight '{value.name}')")
            sizes[location] = file.stat().st_size
        if tensor.length is not None and tensor.length < tensor.nbytes:
            raise ModelError(
                f"{path}: the weight '{value.name}' takes {tensor.nbytes:,} bytes, and the model gives it "
                f"{tensor.length:,} of {location}"
            )
        end = (tensor.offset or 0) + tensor.nbytes
        if end > sizes[location]:
            raise ModelError(
                f"{path}: the external data file {folder / location} is too short: weight '{value.name}' "
                f"ends at byte {end:,}, and the file has {sizes[location]:,}"
            )


def _trust_external_data(model: ir.Model) -> None:
    """Refer to external data by its full path, in place, after it was checked.

    onnx_ir checks a relative path each time, and refuses a file with hard links: a linked package makes one.
    """
    for value in initializers(model):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.ExternalTensor(
                Path(tensor.path).resolve(),
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
            )
