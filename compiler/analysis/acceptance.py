"""Checks that ONNX Runtime accepts a model, by loading one node of each form: a fraction of the whole model's time."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_build

from splitc.compiler.errors import ModelError
from splitc.compiler.graphs.node_key import node_key, tensor_key
from splitc.compiler.nodes import describe_node
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.reading.external_data import SMALL
from splitc.compiler.reading.protos import contents_of
from splitc.runtime.engines.kind import release
from splitc.runtime.engines.onnx_session import load_unoptimized
from splitc.runtime.engines.onnxruntime_cpu import ERRORS


class RefusedError(ModelError):
    """ONNX Runtime can't load the model."""


@contextmanager
def refusals_first(path: Path, trusts_data: bool = False) -> Iterator[None]:
    """On an error inside, raise RefusedError instead if ONNX Runtime refuses the model too: its message is clearer."""
    try:
        yield
    except RefusedError:
        raise
    except Exception:
        check_whole(path, trusts_data)
        raise


def check_accepted(graph: Graph, file: onnx.ModelProto) -> None:
    """Raise RefusedError if ONNX Runtime refuses the model.

    Nodes that repeat an earlier one (`_repeated`) are not loaded: their outputs become inputs. If the rest is refused,
    the whole model is loaded, so that the message is the one that the user would see.
    """
    _check_crashes(graph)
    whole = not _holds_its_data(file) or _has_narrow_sequences(file)
    if whole or _refuses(_without(graph, file).SerializeToString()):
        check_whole(graph.path, graph.trusts_data)


def _check_crashes(graph: Graph) -> None:
    """Raise RefusedError for a node that ONNX Runtime loads, but that crashes the process when it runs."""
    if release(onnxruntime.__version__) >= (1, 32):
        return
    for node in graph.nodes:
        number = operator_of(node).crashes_without
        if number is not None and (number >= len(node.inputs) or node.inputs[number] is None):
            raise RefusedError(
                f"ONNX Runtime {onnxruntime.__version__} crashes on {describe_node(node)} of {graph.path}: "
                f"it has no input {number}, the bias. Version 1.32 runs it: the package onnxruntime, for CPUs and "
                "Python 3.11 or later, in place of onnxruntime-gpu ('splitc help "
                "installing'). Or export the model with a bias (onnxruntime-genai's builder omits one that is all "
                "zeros, as of a model that was not trained)"
            )


def check_whole(path: Path, trusts_data: bool = False) -> None:
    """Raise RefusedError if ONNX Runtime refuses the model's file."""
    if (error := _refuses(path, trusts_data)) is not None:
        raise RefusedError(f"ONNX Runtime can't load {path}: {error}") from error


def _refuses(model: Path | bytes, trusts_data: bool = False) -> Exception | None:
    """The error with which ONNX Runtime refuses to load a model; None if it does not."""
    try:
        load_unoptimized(model, trusts_data=trusts_data)
    except onnxruntime_build.NotImplemented:
        pass  # the CPU provider lacks a kernel: another provider may have it, or an optimization removes the need
    except ERRORS as error:
        return error
    return None


def _holds_its_data(file: onnx.ModelProto) -> bool:
    """Whether each initializer in the file has as many bytes as its shape needs."""
    inside = (tensor for tensor in file.graph.initializer if tensor.raw_data)
    return all(len(tensor.raw_data) == ir.serde.deserialize_tensor(tensor).nbytes for tensor in inside)


def _has_narrow_sequences(file: onnx.ModelProto) -> bool:
    """Whether a model of bfloat16 has ONNX sequences, which do not take it. The nodes that replaced them do."""
    is_narrow = any(tensor.data_type == onnx.TensorProto.BFLOAT16 for tensor in file.graph.initializer)
    return is_narrow and any("Sequence" in node.op_type for node in contents_of(file).nodes)


def _without(graph: Graph, file: onnx.ModelProto) -> onnx.ModelProto:
    """The model without repeated nodes where possible, and with its large weights as inputs."""
    kept = _kept(graph, _repeated(graph))
    made = {value for node in kept for value in node.outputs}
    reduced = onnx.ModelProto(ir_version=max(file.ir_version, 4))
    for domain, version in graph.model.opset_imports.items():  # also those of functions that were inlined
        reduced.opset_import.add(domain=domain, version=version)
    part = reduced.graph
    part.name = file.graph.name
    part.node.extend(map(ir.serde.serialize_node, kept))
    part.input.extend(file.graph.input)
    part.output.extend(file.graph.output)
    names = {value.name for value in made}
    part.value_info.extend(info for info in file.graph.value_info if info.name in names)
    given = {value.name for value in file.graph.input}
    for value in dict.fromkeys(chain.from_iterable(graph.reads[node] for node in kept)):
        tensor = value.const_value
        if value.is_initializer() and tensor is not None and tensor.nbytes <= SMALL:
            if isinstance(tensor, ir.ExternalTensor):
                tensor = ir.Tensor(tensor.numpy(), tensor.dtype)
            part.initializer.append(ir.serde.serialize_tensor(tensor))
            part.initializer[-1].name = value.name or ""
        elif value not in made and value.name not in given and (value.is_initializer() or value.producer() is not None):
            part.input.append(ir.serde.serialize_value(value))
    return reduced


def _repeated(graph: Graph) -> set[ir.Node]:
    """The nodes with the same operator, attributes, and input types and shapes as an earlier node."""
    forms: set[Hashable] = set()
    repeated = set()
    for node in graph.nodes:
        if (key := node_key(node)) is not None:
            form = key, tuple(map(_known, node.inputs)), tuple(bool(value.name) for value in node.outputs)
            if form in forms:
                repeated.add(node)
            forms.add(form)
    return repeated


def _known(value: ir.Value | None) -> Hashable:
    """What ONNX Runtime may check of an input: its type and shape, and its elements if it is small."""
    if value is None:
        return None
    tensor = value.const_value
    if tensor is not None and tensor.nbytes <= SMALL:
        return tensor_key(tensor)
    shape = value.shape if tensor is None else tensor.shape
    return value.dtype if isinstance(value.type, ir.TensorType) else value.type, None if shape is None else shape.dims


def _kept(graph: Graph, repeated: Collection[ir.Node]) -> list[ir.Node]:
    """The nodes that are not repeated, and those that make outputs, or values of unknown type that kept nodes read."""
    needed = set(graph.graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if node not in repeated or not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(value for value in graph.reads[node] if value.type is None)
    return kept[::-1]
