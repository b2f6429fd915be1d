"""Write a rank's graphs as ONNX files, and their weights beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from splitc.compiler.packaging.package_writer import HashedFile, PackageWriter

# The most bytes of a weight that stays in the ONNX file, where constant folding and shape inference see it.
SMALL = 1024
# The bytes of a tensor that are written at a time.
PIECE = 8 << 20


@dataclass(frozen=True)
class WrittenWeights:
    """The weights of a folder: each tensor as written, by the original's id, and the model's data files copied there.

    The originals are kept too, so that their ids stay valid.
    """

    tensors: Mapping[int, tuple[ir.TensorProtocol, ir.TensorProtocol]]
    copies: tuple[Path, ...] = ()

    def place(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """The tensor as it was written, or the tensor itself if it stays in the ONNX file."""
        return self.tensors[id(tensor)][1] if id(tensor) in self.tensors else tensor


NONE = WrittenWeights({})


def write_model_files(
    graphs: Mapping[Path, ir.Graph],
    source: ir.Model,
    writer: PackageWriter,
    link: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    known: WrittenWeights = NONE,
) -> WrittenWeights:
    """Write graphs to these paths, all in one folder, and their weights beside them, each once.

    The weights' file has the graphs' name up to the first dot. With `link`, weights in the model's own data files stay
    there, and the graphs refer to hard links of these files. `progress` is called with the bytes of each weight.
    Weights in `known` are in the folder already. A rank without work has no graphs.
    """
    if not graphs:
        return NONE
    first = next(iter(graphs))
    weights = write_weights(
        graphs.values(), first.with_suffix("").with_suffix(".weights"), writer, link, progress, known
    )
    write_graphs(graphs, source, weights, writer)
    return weights


def write_weights(
    graphs: Iterable[ir.Graph],
    path: Path,
    writer: PackageWriter,
    link: bool,
    progress: Callable[[int], None],
    known: WrittenWeights,
) -> WrittenWeights:
    """Stream the graphs' weights into the file `path`, each once, or link the files that they lie in."""
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    links: dict[Path, Path] = {}
    copies: list[Path] = []
    placed = dict(known.tensors)
    inside: dict[int, ir.TensorProtocol] = {}
    for tensor in _tensors(graphs):
        if id(tensor) in placed or id(tensor) in inside:
            continue
        if link and isinstance(tensor, ir.ExternalTensor):
            original = Path(tensor.path)
            if original not in links:
                links[original] = folder / f"source{len(links)}.weights"
                copies += [] if writer.link(original, links[original]) else [links[original]]
            placed[id(tensor)] = tensor, _at(tensor, links[original], tensor.offset, tensor.length)
            progress(tensor.nbytes)
        elif tensor.nbytes > SMALL:
            inside[id(tensor)] = tensor
        elif isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)):
            placed[id(tensor)] = tensor, ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)
    if inside:
        with writer.open(path) as file:
            for tensor in inside.values():
                progress(tensor.nbytes)
                placed[id(tensor)] = tensor, _at(tensor, path, file.size, tensor.nbytes)
                _write(tensor, file)
    return WrittenWeights(placed, tuple(copies))


def _write(tensor: ir.TensorProtocol, file: HashedFile) -> None:
    """Append a tensor's bytes. Of one that is cut out of another, a piece at a time is in memory."""
    if not isinstance(tensor, ir.LazyTensor) or tensor.dtype.bitwidth < 8:
        cast(Any, tensor).tofile(file)  # not in the protocol, but in every class since onnx_ir 1.1
        return
    array = np.atleast_1d(tensor.numpy())
    rows = max(1, PIECE * len(array) // max(1, array.nbytes))
    for first in range(0, len(array), rows):
        file.write(np.ascontiguousarray(array[first : first + rows]).view(np.uint8).data)


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


def write_graphs(
    graphs: Mapping[Path, ir.Graph], source: ir.Model, weights: WrittenWeights, writer: PackageWriter
) -> None:
    """Write graphs whose weights have been written. Their initializers are replaced by references, in place."""
    for path, graph in graphs.items():
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = weights.place(value.const_value)
        writer.write(path, ir.to_proto(_model(graph, source)).SerializeToString())


def _model(graph: ir.Graph, source: ir.Model) -> ir.Model:
    configurations = (each.configuration for node in graph for each in node.device_configurations)
    return ir.Model(
        graph,
        device_configurations=tuple(dict.fromkeys(each for each in configurations if each is not None)),
        ir_version=source.ir_version,
        producer_name="splitc",
        domain=source.domain,
        model_version=source.model_version,
        metadata_props=dict(source.metadata_props),
    )
