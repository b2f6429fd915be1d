"""Reads a model's file without its weights, and checks that it is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_build

from splitc.compiler.errors import ModelError
from splitc.compiler.reading.external_data import check_external_data
from splitc.compiler.reading.protos import Contents, contents_of, inner_graphs, make_dense
from splitc.runtime.engines.onnx_session import too_large

# Names outside a subgraph, each with its weight; with an empty tensor for other values.
_Names = Mapping[str, onnx.TensorProto]


def read_model(path: Path, trusts_data: bool = False) -> tuple[onnx.ModelProto, frozenset[Path]]:
    """Read a model's file, and check that its weights, which stay on disk, exist. Returns the model and their files.

    With `trusts_data`, these may lie outside the model's folder.

    Raises ModelError if the file is missing or no ONNX model; for unknown operators; for two values of one name; for
    maps; for external data that are missing, too short or outside the model's folder.
    """
    proto = read_proto(path)
    contents = contents_of(proto)
    _check_texts(contents, path)
    files = check_external_data(contents, path, trusts_data)
    with invalid_model_explained(path):
        make_dense(contents)
    _check_declared(proto.graph, path)
    _list_once(proto.graph)
    _declare_alike(proto.graph)
    _check_maps(proto.graph, path)
    for graph, outside in _graphs(proto.graph, {}):
        _check_names(graph, path, outside)
    _check_operators(proto, contents)
    return proto, files


@contextmanager
def invalid_model_explained(path: Path) -> Iterator[None]:
    """Raise ModelError for errors in a model that any pass of onnx_ir reports."""
    try:
        yield
    except (ir.serde.SerdeError, ir.passes.PassError, ValueError, TypeError, KeyError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ModelError(f"{path} is not a valid ONNX model: {reason}") from error


def read_proto(path: Path) -> onnx.ModelProto:
    """An ONNX file unchanged, its weights on disk. Raises ModelError if it is missing or no ONNX model."""
    if not path.is_file():
        what = "is a folder: name the ONNX file in it" if path.is_dir() else "is no regular file"
        raise ModelError(f"{path} {what}" if path.exists() else f"no such model file: {path}")
    if (reason := too_large(path)) is not None:
        raise ModelError(f"can't read {path}: {reason}")
    with path.open("rb") as file:
        if file.read(8)[4:] == b"ORTM":
            raise ModelError(
                f"{path} is not an ONNX model, but one in ONNX Runtime's own format (.ort): name the ONNX file it was "
                "made of"
            )
    try:
        proto = onnx.load(path, "protobuf", load_external_data=False)  # whatever the file is called
    except (google.protobuf.message.DecodeError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is not an ONNX model ({error})") from error
    if lacking := [n for n, there in (("outputs", proto.graph.output), ("opset", proto.opset_import)) if not there]:
        raise ModelError(f"{path} is not an ONNX model (it has no {lacking[0]})")
    return proto


def _check_texts(contents: Contents, path: Path) -> None:
    """Raise ModelError for names that are not UTF-8, which protobuf returns as bytes."""
    nodes = contents.nodes
    texts = chain(
        chain.from_iterable((node.name, node.op_type, node.domain, *node.input, *node.output) for node in nodes),
        (attribute.name for node in nodes for attribute in node.attribute),
        chain.from_iterable((entry.key, entry.value) for node in nodes for entry in node.metadata_props),
    )
    for text in texts:
        if type(text) is not str:
            raise ModelError(f"{path}: the name {text!r} of a node or value is not UTF-8")


def _graphs(graph: onnx.GraphProto, outside: _Names) -> Iterator[tuple[onnx.GraphProto, _Names]]:
    """A graph and its subgraphs, each with the names that are visible from outside."""
    yield graph, outside
    weights = {tensor.name: tensor for tensor in graph.initializer}
    made = chain((value.name for value in graph.input), chain.from_iterable(node.output for node in graph.node))
    names = {**outside, **weights, **dict.fromkeys(made, onnx.TensorProto())}
    for inner in chain.from_iterable(map(inner_graphs, graph.node)):
        yield from _graphs(inner, names)


def _check_declared(graph: onnx.GraphProto, path: Path) -> None:
    """Raise ModelError for an input that is declared twice: feeds are known by their names."""
    if twice := [name for name, count in Counter(value.name for value in graph.input).items() if count > 1]:
        raise ModelError(f"{path}: the input '{twice[0]}' is declared twice: leave out one of them")


def _list_once(graph: onnx.GraphProto) -> None:
    """List each output once. Exporters list one as often as a module returns it, and results are known by their names.

    ONNX Runtime and its checker take such models.
    """
    names = [value.name for value in graph.output]
    for place in reversed(range(len(names))):
        if names[place] in names[:place]:
            del graph.output[place]


def _declare_alike(graph: onnx.GraphProto) -> None:
    """Declare an output that is an input as the input is: onnx_ir keeps the last declaration, perhaps without shape."""
    inputs = {value.name: value for value in graph.input if value.type.tensor_type.HasField("shape")}
    for value in graph.output:
        if value.name in inputs:
            value.CopyFrom(inputs[value.name])


def _check_maps(graph: onnx.GraphProto, path: Path) -> None:
    """Raise ModelError for values that are maps, or lists of them."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type
        while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
            kind = getattr(kind, kind.WhichOneof("value")).elem_type
        if kind.WhichOneof("value") == "map_type":
            raise ModelError(
                f"{path}: '{value.name}' has maps as elements, and splitc takes tensors: export the model without them "
                "(for skl2onnx and onnxmltools, with the option zipmap=False)"
            )


def _check_names(graph: onnx.GraphProto, path: Path, outside: _Names) -> None:
    """Raise ModelError if two values have one name, which tools resolve differently.

    (An input may have an initializer of the same name, its default.) Of two weights with the same name, ONNX Runtime
    takes the first if they are large, and the last if they are small. Equal ones may have one name: onnxslim copies
    weights into subgraphs.
    """
    weights = Counter(tensor.name for tensor in graph.initializer)
    made = Counter(name for node in graph.node for name in node.output if name)
    given = weights.keys() | {value.name for value in graph.input}
    twice = [name for name, count in made.items() if count > 1 or name in given]
    twice += [
        name for name, count in weights.items() if (count > 1 or name in outside) and _differ(graph, name, outside)
    ]
    if twice:
        raise ModelError(
            f"{path}: '{sorted(twice)[0]}' is the name of two values in '{graph.name}': give one of them another"
        )


def _differ(graph: onnx.GraphProto, name: str, outside: _Names) -> bool:
    """Whether the weights of this name differ from each other, or from what has the name outside."""
    tensors = [tensor for tensor in graph.initializer if tensor.name == name]
    others = [outside[name]] if name in outside else []
    return len({tensor.SerializeToString() for tensor in (*tensors, *others)}) > 1


@cache
def known_operators() -> frozenset[tuple[str, str]]:
    """Domains and names of the operators for which ONNX Runtime has a schema."""
    return frozenset((schema.domain, schema.name) for schema in onnxruntime_build.get_all_operator_schema())


def _check_operators(proto: onnx.ModelProto, contents: Contents) -> None:
    """Raise ModelError for an operator that is neither known to ONNX Runtime nor a function of the model."""
    known = known_operators() | {(function.domain, function.name) for function in proto.functions}
    for node in contents.nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (domain, node.op_type) not in known:
            name = f"{domain}.{node.op_type}" if domain else node.op_type
            where = f"node '{node.name}'" if node.name else f"the node that makes '{next(iter(node.output), '')}'"
            raise ModelError(
                f"{where} is the operator {name}, which ONNX Runtime does not know"
                + ("" if domain in {d for d, _ in known} else f" (nor any of the domain '{domain}')")
            )
