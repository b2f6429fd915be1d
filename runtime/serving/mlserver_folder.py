"""Write a folder of models for MLServer: one for a package, or for each module of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from splitc.runtime.files.written import indented, written_whole
from splitc.runtime.package.manifest import Tensor
from splitc.runtime.serving.interface import find_interface, public_form
from splitc.runtime.serving.served_folders import ServedModel, find_models, new_models, put_package
from splitc.runtime.serving.serving_file import FILE_NAME, Serving
from splitc.runtime.session.session import choose_devices

MODEL = "splitc.runtime.serving.mlserver_model.SplitcModel"
# Models run in the server's own process: a session has its own threads, or processes.
SETTINGS = {"parallel_workers": 0}


def export_mlserver(
    package: Path,
    folder: Path,
    serving: Serving,
    *,
    module: str | None = None,
    name: str | None = None,
    sequences: bool | None = None,
) -> list[Path]:
    """Write a model for the package, or each of its modules, into the folder. Returns the models' folders.

    The server's `settings.json` is written if there is none. `sequences` is as in `export_triton`. Raises MisuseError
    for tensors that clients can't send or get, and for a model that exists.
    """
    models = find_models(package, module, name)
    servings = serving.of([model.manifest for model in models], sequences)
    with new_models(folder, [model.name for model in models]) as folders:
        for place, model, own in zip(folders, models, servings, strict=True):
            write_model(place, model, own, MODEL)
    write_settings(folder)
    return [folder / model.name for model in models]


def write_settings(folder: Path) -> None:
    """Write the server's settings, if there are none."""
    if not (folder / "settings.json").exists():
        _write_json(folder / "settings.json", SETTINGS)


def write_model(folder: Path, model: ServedModel, serving: Serving, kind: str) -> None:
    """Write a model into its folder. `kind` is the class that MLServer makes of it."""
    choose_devices(model.manifest, serving.devices)
    interface = find_interface(model.manifest, serving.sequences)
    settings = {
        "name": model.name,
        "implementation": kind,
        "inputs": list(_describe([*interface.inputs, *interface.optional])),
        "outputs": list(_describe(interface.outputs)),
        "parameters": {"uri": f"./{FILE_NAME}"},
    }
    put_package(model, serving, folder)
    _write_json(folder / "model-settings.json", settings)


def _describe(tensors: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    for tensor in tensors:
        datatype, shape = public_form(tensor)
        yield {"name": tensor.name, "datatype": datatype, "shape": shape}


def _write_json(path: Path, content: Any) -> None:
    with written_whole(path) as file:
        file.write(indented(content))
