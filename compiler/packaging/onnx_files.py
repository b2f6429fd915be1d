"""Engines for ONNX Runtime: the stage's graph as an ONNX file, its weights beside it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir

# Smaller weights stay in the ONNX file, where constant folding and shape inference see them.
SMALL = 1024
# What os.link answers where a hard link can't be: another file system, or one without hard links.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


def write_engines(
    pieces: Mapping[Path, ir.Graph], source: ir.Model, link: bool, progress: Callable[[int], None]
) -> tuple[list[Path], list[Path]]:
    """Write a rank's graphs to these paths, all in one folder, and their weights beside them, each once.

    Weights are streamed from where they are into one file, named as the graphs up to the first dot. With `link`, those
    that lie in the model's own data files stay there, and the graphs refer to hard links of these. `progress` is told
    the bytes of each weight. Returns the links, and the files that had to be copied since a link was not possible.
    A rank that has nothing to do has no graphs.
    """
    if not pieces:
        return [], []
    first = next(iter(pieces))
    folder = first.parent
    folder.mkdir(parents=True, exist_ok=True)
    links: dict[Path, Path] = {}
    copies: list[Path] = []
    written: dict[int, ir.TensorProtocol] = {}
    inside: dict[int, ir.TensorProtocol] = {}
    users = [
        value for graph in pieces.values() for value in graph.initializers.values() if value.const_value is not None
    ]
    for value in users:
        tensor = value.const_value
        assert tensor is not None
        if id(tensor) in written or id(tensor) in inside:
            continue
        if link and isinstance(tensor, ir.ExternalTensor):
            original = Path(tensor.path)
            if original not in links:
                links[original] = folder / f"source{len(links)}.weights"
                copies += [] if _link(original, links[original]) else [links[original]]
            written[id(tensor)] = _moved(tensor, links[original])
            progress(tensor.nbytes)
        elif tensor.nbytes > SMALL:
            inside[id(tensor)] = tensor
        elif isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)):
            written[id(tensor)] = ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)
    if inside:
        external = ir.external_data.convert_tensors_to_external(
            list(inside.values()),
            folder,
            f"{first.name.partition('.')[0]}.weights",
            callback=lambda tensor, _: progress(tensor.nbytes),
        )
        written.update(zip(inside, external))
    originals = [(value, value.const_value) for value in users]
    for value, tensor in originals:
        value.const_value = written.get(id(tensor), tensor)
    for path, graph in pieces.items():
        ir.save(_model(graph, source), path)
    return [each for each in links.values() if each not in copies], copies


def _moved(tensor: ir.ExternalTensor, path: Path) -> ir.ExternalTensor:
    """The same bytes in another file."""
    return ir.ExternalTensor(
        path.name,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        base_dir=path.parent,
    )


def _link(source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`; where that can't be, copy it and return False."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        shutil.copyfile(source, target)
        return False
    return True


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
