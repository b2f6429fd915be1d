"""Facts that distinguish the models of a folder: read from their files, without their weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx.external_data_helper import uses_external_data

from splitc.compiler.frontend.loading import read_proto
from splitc.compiler.frontend.protos import contents_of

# A dimension: a number, a symbol, or None if the model does not say.
Dimension = int | str | None


@dataclass(frozen=True)
class ModelFacts:
    """A model's inputs with their dimensions, its outputs, and the bytes of its weights and the files beside it.

    `switch` is the input that decides an If with all outputs: it chooses between two models in one file.
    """

    path: Path
    inputs: Mapping[str, tuple[Dimension, ...]]
    outputs: frozenset[str]
    weights_bytes: int
    data_files: frozenset[Path]
    switch: str | None = None


def read_facts(path: Path) -> ModelFacts:
    """Read an ONNX file's facts. Raises ModelError if it is no ONNX model."""
    proto = read_proto(path)
    tensors = list(_weights(proto))
    outputs = frozenset(value.name for value in proto.graph.output)
    return ModelFacts(
        path=path,
        inputs={value.name: _dimensions(value) for value in proto.graph.input},
        outputs=outputs,
        weights_bytes=sum(ir.serde.deserialize_tensor(tensor).nbytes for tensor in tensors),
        data_files=frozenset(_data_file(path, tensor) for tensor in tensors if uses_external_data(tensor)),
        switch=_find_switch(proto.graph, outputs),
    )


def _weights(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    contents = contents_of(proto)
    return chain.from_iterable(graph.initializer for graph in (*contents.graphs, *contents.in_functions))


def _data_file(path: Path, tensor: onnx.TensorProto) -> Path:
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    return Path(os.path.normpath(path.parent / location))


def _dimensions(value: onnx.ValueInfoProto) -> tuple[Dimension, ...]:
    return tuple(
        size.dim_value if size.HasField("dim_value") else size.dim_param or None
        for size in value.type.tensor_type.shape.dim
    )


def _find_switch(graph: onnx.GraphProto, outputs: frozenset[str]) -> str | None:
    inputs = {value.name for value in graph.input}
    for node in graph.node:
        if node.op_type == "If" and node.input[0] in inputs and outputs <= set(node.output):
            return node.input[0]
    return None
