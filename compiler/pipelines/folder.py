"""A folder of models, by its contents: its modules, the files that travel with them, and files that are left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnx_ir as ir
from onnx.external_data_helper import uses_external_data

from splitc.compiler.errors import ModelError
from splitc.compiler.pipelines.names import (
    GENAI,
    files_of_folder,
    find_models,
    is_package,
    name_models,
    names_of_uses,
    need_modules,
)
from splitc.compiler.reading.loading import read_proto
from splitc.compiler.reading.protos import contents_of

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


# Weights for other programs, and their tables of contents. The ONNX files hold the same weights.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ot", ".onnx_data")
OTHER_WEIGHTS = (*WEIGHTS, ".onnx.data", *(f"{suffix}.index.json" for suffix in (".safetensors", ".bin")))


@dataclass(frozen=True)
class FolderModule:
    """A model of a folder. `settings` are inputs that are bound for this use of it."""

    name: str
    facts: ModelFacts
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """A file that does not go into the package, and why."""

    path: str
    bytes: int
    why: str


@dataclass(frozen=True)
class ModelFolder:
    """The models of the folder `path`, the `files` that travel with them, and the files that are left out."""

    path: Path
    modules: tuple[FolderModule, ...]
    files: tuple[PurePosixPath, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def names(self) -> list[str]:
        """The names of the modules."""
        return [module.name for module in self.modules]

    def source(self, module: FolderModule) -> str:
        """The path of a module's model in the folder."""
        return module.facts.path.relative_to(self.path).as_posix()


def read_folder(
    path: Path, wanted: Sequence[str] = (), bound: Collection[str] = (), trusts_links: bool = False
) -> ModelFolder:
    """Read the contents of a folder. `wanted` are names of modules, or aliases; without any, the default modules.

    A model with a switch has two uses, each a module, unless the switch is among the `bound` inputs (`NAME.INPUT` or
    `INPUT`). It is left out by default if the two are also separate files beside it.

    Raises ModelError for a folder without models or with two of one name, and for a file that is a link to outside,
    unless `trusts_links`; MisuseError if a wanted module does not exist.
    """
    if is_package(path):
        raise ModelError(f"{path} is a package, made by 'splitc compile': name the folder of the ONNX models")
    files = list(files_of_folder(path))
    _check_names_readable(files)
    models = {model: read_facts(path / model) for model in find_models(files)}
    if not models:
        raise ModelError(f"{path} has no ONNX file in it (*.onnx), nor in its subfolders")
    named, unused = _name_models(path, models)
    chosen, others = _choose(named, wanted)
    unused |= {named[name].path: why for name, why in others.items()}
    modules = [use for name in chosen for use in _uses(name, named[name], bound)]
    _check_names([(module.name, module.facts.path) for module in modules])
    data = {file for facts in models.values() for file in facts.data_files}
    left_out = [_leave_out(path, model.relative_to(path).as_posix(), why) for model, why in unused.items()]
    beside = [file for file in files if file not in models and Path(os.path.normpath(path / file)) not in data]
    weights = [file for file in beside if file.name.lower().endswith(OTHER_WEIGHTS)]
    left_out += [_leave_out(path, file.as_posix(), "weights in another format") for file in weights]
    travel = [file for file in beside if file not in weights]
    if not trusts_links:
        _check_inside(path, [*models, *travel], models)
    return ModelFolder(path, tuple(modules), tuple(travel), tuple(left_out))


def _check_names_readable(files: Sequence[PurePosixPath]) -> None:
    """Raise ModelError for a file whose name is not UTF-8: the package's tables of contents are UTF-8."""
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            shown = os.fsencode(file).decode("utf-8", "replace")
            raise ModelError(f"the name of the file {shown} is not UTF-8: give it another one") from None


def _check_inside(folder: Path, files: Sequence[PurePosixPath], models: Iterable[PurePosixPath]) -> None:
    """Raise ModelError for a link to outside the folder: a folder must not copy any file of this machine.

    In caches that store files by their hashes, all files are links to one folder, including the models.
    """
    linked = [folder / model for model in models if (folder / model).is_symlink()]
    roots = {folder.resolve(), *(model.resolve().parent for model in linked)}
    for file in files:
        target = Path(os.path.realpath(folder / file))
        if not target.is_file():
            raise ModelError(f"{folder / file} can't travel with the models: it is not a file, or it is a broken link")
        if roots.isdisjoint(target.parents):
            raise ModelError(
                f"{folder / file} is a link to {target}, outside the models' folder: --trust-external-data permits "
                "that, for a folder whose maker you trust"
            )


def _leave_out(folder: Path, path: str, why: str) -> LeftOut:
    return LeftOut(path, (folder / path).stat().st_size, why)


def _name_models(
    folder: Path, models: Mapping[PurePosixPath, ModelFacts]
) -> tuple[dict[str, ModelFacts], dict[Path, str]]:
    """The models by name, and the unused ones with the reason."""
    names = [(name, models[path]) for name, path in name_models(folder, models)]
    used = {facts.path for _, facts in names}
    _check_names([(name, facts.path) for name, facts in names])
    unused = {facts.path: f"{GENAI} does not name it" for facts in models.values() if facts.path not in used}
    return dict(names), unused


def _choose(named: Mapping[str, ModelFacts], wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The models to take, by name, and the others with the reason to leave them out."""
    if not wanted:
        spare = _find_spare(named)
        return [name for name in named if name not in spare], spare
    chosen = dict.fromkeys(module for name in wanted for module in need_modules(name, list(named), "--module"))
    return list(chosen), {name: "--module does not name it" for name in named if name not in chosen}


def _find_spare(named: Mapping[str, ModelFacts]) -> dict[str, str]:
    """Models with a switch that are another form of two others beside them, with the reason to leave them out.

    Together the two have all its inputs except the switch, and all its outputs.
    """
    spare = {}
    for name, facts in named.items():
        beside = [n for n, other in named.items() if n != name and other.path.parent == facts.path.parent]
        for pair in combinations(beside, 2) if facts.switch else ():
            inputs, outputs = ({key for n in pair for key in getattr(named[n], of)} for of in ("inputs", "outputs"))
            if inputs == facts.inputs.keys() - {facts.switch} and outputs == facts.outputs:
                spare[name] = (
                    f"{' and '.join(pair)} in one file, which '{facts.switch}' chooses between: --module takes it"
                )
    return spare


def _uses(name: str, facts: ModelFacts, bound: Collection[str]) -> list[FolderModule]:
    """A model's uses: two if it has a switch that is not bound."""
    if facts.switch is None or facts.switch in bound or f"{name}.{facts.switch}" in bound:
        return [FolderModule(name, facts)]
    uses = zip(names_of_uses(name), (False, True), strict=True)
    return [FolderModule(use, facts, {facts.switch: value}) for use, value in uses]


def _check_names(names: Sequence[tuple[str, Path]]) -> None:
    """Raise ModelError for two models of one name."""
    count = Counter(name for name, _ in names)
    if twice := [(name, path) for name, path in names if count[name] > 1]:
        paths = " and ".join(str(path) for name, path in twice if name == twice[0][0])
        raise ModelError(f"two models have the name '{twice[0][0]}', {paths}: rename a file or its folder")
