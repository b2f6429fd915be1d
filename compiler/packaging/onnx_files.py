"""Writes a rank's graphs as ONNX files, with references to their weights in files beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.engine_graphs.gpu_functions import functions_of
from splitc.compiler.packaging.build_messages import BLOCK
from splitc.compiler.packaging.writer import PackageWriter, WeightFile, in_source_order, write_weight_files
from splitc.compiler.reading.external_data import SMALL

# The first version of ONNX's format that has functions.
WITH_FUNCTIONS = 8


@dataclass(frozen=True)
class PlacedWeights:
    """Where the weights of a folder lie.

    - `tensors`: each tensor and the reference to its place, by the tensor's id. Tensors are kept so that ids stay
      valid.
    - `file`: still has to be written.
    - `copies`: the model's data files that were copied into the folder.
    """

    tensors: Mapping[int, tuple[ir.TensorProtocol, ir.TensorProtocol]]
    file: WeightFile | None = None
    copies: tuple[Path, ...] = ()

    def place(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """The tensor at its place, or the tensor itself if it stays in the ONNX file."""
        return self.tensors[id(tensor)][1] if id(tensor) in self.tensors else tensor


NONE = PlacedWeights({})


def write_model_files(graphs: Mapping[Path, ir.Graph], source: ir.Model, writer: PackageWriter) -> None:
    """Write graphs to these paths, all in one folder, and their weights beside them, each once."""
    weights = write_graphs(graphs, source, writer)
    if weights.file is not None:
        write_weight_files([weights.file], writer)


def write_graphs(
    graphs: Mapping[Path, ir.Graph],
    source: ir.Model,
    writer: PackageWriter,
    link: bool = False,
    known: PlacedWeights = NONE,
) -> PlacedWeights:
    """Write graphs to these paths, all in one folder. Returns where their weights lie, in a file still to be written.

    That file has the graphs' name up to the first dot, and each weight once. With `link`, weights in the model's own
    data files stay there, and the graphs refer to hard links of these files. Weights in `known` are in the folder
    already.

    Initializers are replaced by references, in place. A rank without work has no graphs.
    """
    if not graphs:
        return NONE
    first = next(iter(graphs))
    first.parent.mkdir(parents=True, exist_ok=True)
    weights = _place(_tensors(graphs.values()), first.with_suffix("").with_suffix(".weights"), writer, link, known)
    for path, graph in graphs.items():
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = weights.place(value.const_value)
        _drop_notes(graph)
        writer.write(path, ir.to_proto(_model(graph, source)).SerializeToString())
    return weights


def _drop_notes(graph: ir.Graph) -> None:
    """Drop exporters' annotations of nodes and values, such as lines of source: sessions hold them three times."""
    nodes = tuple(graph.all_nodes())
    made = (value for node in nodes for value in node.outputs)
    items: list[ir.Node | ir.Value] = [*nodes, *graph.inputs, *graph.initializers.values(), *made]
    for item in items:
        item.doc_string = None
        for key in item.metadata_props.keys() - {BLOCK}:
            del item.metadata_props[key]


def _place(
    tensors: Iterable[ir.TensorProtocol], path: Path, writer: PackageWriter, link: bool, known: PlacedWeights
) -> PlacedWeights:
    """Assign each tensor a place: in the file `path`, or in a link to the file that it lies in."""
    links: dict[Path, Path] = {}
    copies: list[Path] = []
    placed = dict(known.tensors)
    inside: dict[int, ir.TensorProtocol] = {}
    for tensor in tensors:
        if id(tensor) in placed:
            continue
        if link and isinstance(tensor, ir.ExternalTensor):
            original = Path(tensor.path)
            if original not in links:
                links[original] = path.with_name(f"source{len(links)}.weights")
                copies += [] if writer.link(original, links[original]) else [links[original]]
            placed[id(tensor)] = tensor, _at(tensor, links[original], tensor.offset, tensor.length)
        elif tensor.nbytes > SMALL and tensor.dtype != ir.DataType.STRING:  # texts can't lie outside of the graph
            inside[id(tensor)] = tensor
        elif isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)):
            placed[id(tensor)] = tensor, ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)
    ordered = in_source_order(inside.values())
    for tensor, offset in zip(ordered, accumulate((tensor.nbytes for tensor in ordered), initial=0)):  # noqa: B905
        placed[id(tensor)] = tensor, _at(tensor, path, offset, tensor.nbytes)
    return PlacedWeights(placed, WeightFile(path, tuple(ordered)) if ordered else None, tuple(copies))


def _tensors(graphs: Iterable[ir.Graph]) -> list[ir.TensorProtocol]:
    values = (value for graph in graphs for value in graph.initializers.values())
    return [value.const_value for value in values if value.const_value is not None]


def _at(tensor: ir.TensorProtocol, path: Path, offset: int | None, length: int | None) -> ir.ExternalTensor:
    """The tensor as a reference to these bytes of a file."""
    return ir.ExternalTensor(
        path.name,
        offset,
        length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        base_dir=path.parent,
    )


def _model(graph: ir.Graph, source: ir.Model) -> ir.Model:
    functions = functions_of(graph)
    configurations = (device.configuration for node in graph for device in node.device_configurations)
    return ir.Model(
        graph,
        functions=functions,
        device_configurations=tuple(
            dict.fromkeys(configuration for configuration in configurations if configuration is not None)
        ),
        ir_version=max(source.ir_version, WITH_FUNCTIONS) if functions else source.ir_version,
        producer_name="splitc",
        domain=source.domain,
        model_version=source.model_version,
        metadata_props=dict(source.metadata_props),
    )
