"""Read a model's file lazily, and check that it is complete and that ONNX Runtime accepts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_build

from splitc.compiler.model_errors import ModelError
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.engines.operator_library import library_path


def load_model(path: Path) -> ir.Model:
    """Read a model. Its weights stay on disk, and are checked to be there.

    Raises ModelError if the file is missing or no ONNX model; for operators that ONNX Runtime does not know; for a name
    of two values; for sparse weights; for external data that are missing, too short or outside the model's folder; and
    for anything else that ONNX Runtime refuses to load.
    """
    proto = _read(path)
    for graph, outside in _graphs(proto.graph, frozenset()):
        _check_names(graph, path, outside)
    _check_operators(proto)
    _check_external_data(proto, path)
    try:
        load_unoptimized(path)
    except onnxruntime_build.NotImplemented:
        pass  # the CPU provider lacks a kernel: another provider may have it, or an optimization removes the need
    except ERRORS as error:
        raise ModelError(f"ONNX Runtime can't load {path}: {error}") from error
    try:
        model = ir.from_proto(proto)
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ModelError(f"{path} is not a valid ONNX model: {reason}") from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    _trust_external_data(model)
    return model


def load_unoptimized(path: Path, uses_operators: bool = False) -> ort.InferenceSession:
    """Load an ONNX file in ONNX Runtime without optimizations. External weights are mapped into memory, not read.

    One that `uses_operators` of splitc's library can't be run. Raises one of ERRORS: NotImplemented if the CPU provider
    has no kernel for an operator.
    """
    options = ort.SessionOptions()
    if uses_operators:
        options.register_custom_ops_library(str(library_path()))
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_reuse = False  # planning the reuse takes 20 seconds for 8,000 nodes
    options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _read(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ModelError(f"no such model file: {path}")
    try:
        proto = onnx.load(path, load_external_data=False)
    except (google.protobuf.message.DecodeError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is not an ONNX model ({error})") from error
    if lacking := [n for n, there in (("outputs", proto.graph.output), ("opset", proto.opset_import)) if not there]:
        raise ModelError(f"{path} is not an ONNX model (it has no {lacking[0]})")
    return proto


def _graphs(graph: onnx.GraphProto, outside: frozenset[str]) -> Iterator[tuple[onnx.GraphProto, frozenset[str]]]:
    """A graph and the graphs inside its nodes, each with the names of the scopes around it."""
    yield graph, outside
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    names = outside.union(given, chain.from_iterable(node.output for node in graph.node))
    for inner in chain.from_iterable(map(_inner_graphs, graph.node)):
        yield from _graphs(inner, names)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a model, including those of its functions and those inside other nodes."""
    stack = [*proto.graph.node, *chain.from_iterable(function.node for function in proto.functions)]
    while stack:
        node = stack.pop()
        yield node
        stack += chain.from_iterable(graph.node for graph in _inner_graphs(node))


def _check_names(graph: onnx.GraphProto, path: Path, outside: frozenset[str]) -> None:
    """Raise ModelError for a name of two values, which tools resolve differently.

    (An input may have an initializer of the same name, its default.) Of two weights with one name, ONNX Runtime takes
    the first if they are large, and the last if they are small.
    """
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(f"{path}: the weight '{name}' is a sparse tensor, which splitc does not read: make it dense")
    weights = Counter(tensor.name for tensor in graph.initializer)
    made = Counter(name for node in graph.node for name in node.output if name)
    given = weights.keys() | {value.name for value in graph.input}
    twice = [name for name, count in made.items() if count > 1 or name in given]
    twice += [name for name, count in weights.items() if name in outside or (count > 1 and _differ(graph, name))]
    if twice:
        raise ModelError(
            f"{path}: '{sorted(twice)[0]}' is the name of two values in '{graph.name}': give one of them another"
        )


def _differ(graph: onnx.GraphProto, name: str) -> bool:
    """Whether the weights of this name differ."""
    return len({tensor.SerializeToString() for tensor in graph.initializer if tensor.name == name}) > 1


@cache
def _known_operators() -> frozenset[tuple[str, str]]:
    """Domains and names of the operators for which ONNX Runtime has a schema."""
    return frozenset((schema.domain, schema.name) for schema in onnxruntime_build.get_all_operator_schema())


def _check_operators(proto: onnx.ModelProto) -> None:
    """Raise ModelError for an operator that is neither known to ONNX Runtime nor a function of the model."""
    known = _known_operators() | {(function.domain, function.name) for function in proto.functions}
    for node in _nodes(proto):
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (domain, node.op_type) not in known:
            name = f"{domain}.{node.op_type}" if domain else node.op_type
            where = f"node '{node.name}'" if node.name else f"the node that makes '{next(iter(node.output), '')}'"
            raise ModelError(
                f"{where} is the operator {name}, which ONNX Runtime does not know"
                + ("" if domain in {d for d, _ in known} else f" (nor any of the domain '{domain}')")
            )


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All weights of a model, and the tensors that are attributes of its nodes."""
    for graph, _ in _graphs(proto.graph, frozenset()):
        yield from graph.initializer
    for node in _nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_external_data(proto: onnx.ModelProto, path: Path) -> None:
    """Raise ModelError unless each external tensor lies completely in a file below the model's folder."""
    folder = path.parent.resolve()
    sizes: dict[str, int] = {}
    for tensor in filter(uses_external_data, _tensors(proto)):
        try:
            place = ExternalDataInfo(tensor)
        except ValueError as error:
            raise ModelError(f"{path}: {error}") from error
        if place.location not in sizes:
            file = (folder / place.location).resolve()
            # A model is untrusted data: it must not make us copy /etc/passwd into a package.
            if not file.is_relative_to(folder):
                raise ModelError(
                    f"{path}: weight '{tensor.name}' lies in '{place.location}', outside the model's folder"
                )
            if not file.is_file():
                raise ModelError(f"{path}: the external data file {file} is missing (it holds weight '{tensor.name}')")
            sizes[place.location] = file.stat().st_size
        needed = ir.serde.deserialize_tensor(tensor).nbytes
        if place.length is not None and place.length < needed:
            raise ModelError(
                f"{path}: the weight '{tensor.name}' takes {needed:,} bytes, and the model gives it "
                f"{place.length:,} of {place.location}"
            )
        end = (place.offset or 0) + needed
        if end > sizes[place.location]:
            raise ModelError(
                f"{path}: the external data file {folder / place.location} is too short: weight '{tensor.name}' "
                f"ends at byte {end:,}, and the file has {sizes[place.location]:,}"
            )


def _trust_external_data(model: ir.Model) -> None:
    """Replace relative paths of external data by full ones, in place, after they were checked.

    onnx_ir checks relative paths each time, and refuses files with hard links, which packages may make.
    """
    for value in chain.from_iterable(graph.initializers.values() for graph in model.graphs()):
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
