"""Engines for ONNX Runtime: the stage's graph as an ONNX file, its weights beside it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

# Smaller weights stay in the ONNX file, where constant folding and shape inference see them.
SMALL = 1024
# What os.link answers where a hard link can't be: another file system, or one without hard links.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


def write_engine(graph: ir.Graph, source: ir.Model, path: Path, progress: Callable[[int], None]) -> None:
    """Write `graph` to `path` and its weights to a file of the same name with the ending `.weights`.

    The weights are streamed from where they are. `progress` is told the bytes of each weight as it is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(
        _model(graph, source),
        path,
        external_data=path.with_suffix(".weights").name,
        size_threshold_bytes=SMALL,
        callback=lambda tensor, _: progress(tensor.nbytes),
    )


def write_linked_engine(
    graph: ir.Graph, source: ir.Model, path: Path, progress: Callable[[int], None]
) -> tuple[list[Path], list[Path]]:
    """Write `graph` to `path`, its weights being in hard links to the model's own data files; no byte is copied.

    Returns the links, and the files that had to be copied since a link was not possible. A weight that is no external
    data of the model goes into a file of its own, as in `write_engine`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    links: dict[str, Path] = {}
    copies: list[Path] = []
    inside: list[ir.Value] = []
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        if not isinstance(tensor, ir.ExternalTensor):
            inside += [value] if tensor.nbytes > SMALL else []
            continue
        location = str(tensor.location)
        if location not in links:
            target = path.parent / f"source{len(links)}.weights"
            copies += [] if _link(Path(tensor.path), target) else [target]
            links[location] = target
        value.const_value = ir.ExternalTensor(
            links[location].name,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            base_dir=path.parent,
        )
        progress(tensor.nbytes)
    if inside:
        tensors = [value.const_value for value in inside if value.const_value is not None]
        written = ir.external_data.convert_tensors_to_external(tensors, path.parent, path.with_suffix(".weights").name)
        for value, tensor in zip(inside, written):
            value.const_value = tensor
    ir.save(_model(graph, source), path)
    return [link for link in links.values() if link not in copies], copies


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
    return ir.Model(
        graph,
        ir_version=source.ir_version,
        producer_name="splitc",
        domain=source.domain,
        model_version=source.model_version,
        metadata_props=dict(source.metadata_props),
    )
