"""The files beside a model that hold its weights. They are checked once, when the model is opened.

A model is untrusted: it must not make splitc copy /etc/passwd into a package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import onnx_ir as ir
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from splitc.compiler.errors import ModelError
from splitc.compiler.reading.protos import Contents

# A weight of at most this many bytes is small: a list of sizes, a scale. It stays in the ONNX file, where constant
# folding and shape inference see it. The number is onnx's own, for models with external data (`size_threshold`).
SMALL = 1024


def check_external_data(contents: Contents, path: Path, trusted: bool = False) -> frozenset[Path]:
    """Check that each tensor of the model lies completely in a file below the model's folder. Returns these files.

    If the model's path is a link (as in caches that store files by hash), they may also lie below the folder of its
    target; if the data are `trusted`, anywhere. Tensors other than a graph's weights are read into the model. Raises
    ModelError, which names the tensor.
    """
    files = _Files(path, trusted)
    weights = list(filter(uses_external_data, chain.from_iterable(graph.initializer for graph in contents.graphs)))
    others = list(filter(uses_external_data, _others(contents)))
    for tensor in (*weights, *others):
        files.check(tensor)
    for tensor in others:
        files.read(tensor)
    return files.checked


def _others(contents: Contents) -> Iterator[onnx.TensorProto]:
    """All tensors except the initializers of the model's graphs: those in attributes, and in functions."""
    for graph in contents.in_functions:
        yield from graph.initializer
    for graph in (*contents.graphs, *contents.in_functions):
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for attribute in chain.from_iterable(node.attribute for node in contents.nodes):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for sparse in attribute.sparse_tensors:
            yield from (sparse.values, sparse.indices)


class _Files:
    """The files of a model's external data."""

    def __init__(self, path: Path, trusted: bool) -> None:
        self._path = path
        self._folder = path.parent.resolve()
        self._roots = {self._folder, path.resolve().parent}
        self._trusted = trusted
        self._files: dict[str, Path] = {}
        self._sizes: dict[str, int] = {}

    @property
    def checked(self) -> frozenset[Path]:
        """The files of all tensors that were checked."""
        return frozenset(self._files.values())

    def check(self, tensor: onnx.TensorProto) -> None:
        """Raise ModelError unless the whole tensor is in its file."""
        name, place = tensor.name, self._place(tensor)
        if place.location not in self._sizes:
            self._files[place.location] = self._find(name, place.location)
            self._sizes[place.location] = self._files[place.location].stat().st_size
        needed = ir.serde.deserialize_tensor(tensor).nbytes
        offset = place.offset or 0
        if offset < 0 or (place.length is not None and place.length < needed):
            raise ModelError(
                f"{self._path}: the weight '{name}' takes {needed:,} bytes, and the model gives it "
                f"{place.length or 0:,} of {place.location}, from byte {offset:,}"
            )
        if offset + needed > self._sizes[place.location]:
            raise ModelError(
                f"{self._path}: the external data file {self._folder / place.location} is too short: weight '{name}' "
                f"ends at byte {offset + needed:,}, and the file has {self._sizes[place.location]:,}"
            )

    def read(self, tensor: onnx.TensorProto) -> None:
        """Read a checked tensor into the model."""
        place = self._place(tensor)
        with (self._folder / place.location).open("rb") as file:
            file.seek(place.offset or 0)
            tensor.raw_data = file.read(ir.serde.deserialize_tensor(tensor).nbytes)
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT

    def _place(self, tensor: onnx.TensorProto) -> ExternalDataInfo:
        try:
            place = ExternalDataInfo(tensor)
        except ValueError as error:
            raise ModelError(f"{self._path}: the place of the weight '{tensor.name}': {error}") from error
        if not place.location:
            raise ModelError(f"{self._path}: the weight '{tensor.name}' lies in another file, which is not named")
        return place

    def _find(self, name: str, location: str) -> Path:
        """The file of this location. Raises ModelError if it is outside the model's folder, or missing."""
        try:
            named = (self._folder / location).absolute()
            inside = self._folder in Path(os.path.normpath(named)).parents  # by its text, without following links
            file = Path(os.path.realpath(named))  # unlike resolve(), it takes links in a circle
            exists = file.is_file()
        except (OSError, ValueError) as error:  # names too long, or with a zero byte
            raise ModelError(f"{self._path}: the weight '{name}' lies in {location!r}: {error}") from error
        own = inside and any(root in file.parents for root in self._roots)
        if not own and not self._trusted:
            link = "" if not inside or file == named else f", a link to {file}"
            raise ModelError(
                f"{self._path}: weight '{name}' lies in '{location}'{link}, outside the model's folder: "
                "--trust-external-data permits that, for a model whose maker you trust"
            )
        if not exists:
            raise ModelError(f"{self._path}: the external data file {file} is missing (it holds weight '{name}')")
        with file.open("rb"):  # raises the system's error if it can't be read
            pass
        return file


def with_full_path(tensor: ir.ExternalTensor, path: Path) -> ir.ExternalTensor:
    """A checked external tensor, with the full path of its file.

    onnx_ir checks relative paths at each read, and refuses files with hard links, which packages may have.
    """
    return ir.ExternalTensor(
        path, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or ""
    )


def load_settled(path: Path) -> ir.Model:
    """Read a model again whose external data were checked before."""
    model = ir.load(path)
    settle_weights(model, path.parent)
    return model


@contextmanager
def saved(model: ir.Model, name: str) -> Iterator[Path]:
    """A file of a model, with its data beside it, that exists inside the context."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        ir.save(model, path, external_data=f"{name}.data")
        yield path


def settle_weights(model: ir.Model, folder: Path) -> None:
    """Set the full paths of checked weights, and the types of their values by the tensors, in place.

    The types that the file declares may be wrong. Small weights become arrays, which are faster to read than protobufs.
    """
    paths: dict[object, Path] = {}
    for value in chain.from_iterable(graph.initializers.values() for graph in model.graphs()):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            if tensor.location not in paths:
                paths[tensor.location] = (folder / tensor.location).resolve()
            value.const_value = with_full_path(tensor, paths[tensor.location])
        elif isinstance(tensor, ir.TensorProtoTensor) and tensor.nbytes <= SMALL:
            value.const_value = ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)
        if tensor is not None:
            value.dtype = tensor.dtype
