"""Write a Triton model repository: one model for a package, or for each of its modules."""

from __future__ import annotations

from pathlib import Path

from splitc.runtime.errors import MisuseError
from splitc.runtime.requests.outputs import DeviceArrays
from splitc.runtime.requests.rank_kinds import choose_ranks
from splitc.runtime.serving.interface import find_interface, find_rows, why_not_batched
from splitc.runtime.serving.served_folders import ServedModel, find_models, new_models, put_package
from splitc.runtime.serving.serving_file import Serving
from splitc.runtime.serving.triton_config import model_config
from splitc.runtime.session.session import choose_devices

# The most rows of a batch of requests, unless the engines take fewer. A choice, which --batch replaces: more rows take
# more activations than were planned for.
MOST_ROWS = 32
MODEL = '''"""A package of splitc. Triton's Python must have splitc: pip install splitc."""

from splitc.runtime.serving.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def export_triton(
    package: Path,
    repository: Path,
    serving: Serving,
    *,
    module: str | None = None,
    name: str | None = None,
    sequences: bool | None = None,
    batch: int | None = None,
) -> list[Path]:
    """Write a model for the package, or each of its modules, into the repository. Returns the models' folders.

    - `sequences`: keep states on the ranks; None does so for models with caches.
    - `batch`: the most rows of joined requests, MOST_ROWS by default if rows are independent; 0 joins none, and takes
      requests of any number of rows.

    Either all models are written or none. Raises MisuseError for a model that Triton can't serve, and for one that
    exists.
    """
    models = find_models(package, module, name)
    servings = serving.of([model.manifest for model in models], sequences)
    if batch and all(own.sequences for own in servings):
        raise MisuseError(f"--batch {batch} is for requests that are no sequences: leave it out, or add --no-sequences")
    with new_models(repository, [model.name for model in models]) as folders:
        for folder, model, own in zip(folders, models, servings, strict=True):
            _write_model(folder, model, own, batch)
    return [repository / model.name for model in models]


def _write_model(folder: Path, model: ServedModel, serving: Serving, batch: int | None) -> None:
    name, manifest = model.name, model.manifest
    devices = choose_devices(manifest, serving.devices)
    interface = find_interface(manifest, serving.sequences)
    if serving.sequences:
        idle, most = serving.idle_seconds, serving.most_sequences
        config = model_config(name, interface, idle_seconds=idle, most_sequences=most)
    else:
        if batch and (why := why_not_batched(manifest, interface)) is not None:
            raise MisuseError(f"--batch {batch}: requests of {name} can't be batched, as {why}")
        rows = choose_rows(find_rows(manifest, interface), batch, name)
        takes_gpu_arrays = DeviceArrays(manifest, devices, choose_ranks(serving.ranks, devices, None)).possible
        config = model_config(name, interface, rows=rows, on_gpus=takes_gpu_arrays)
    version = folder / "1"
    version.mkdir()
    put_package(model, serving, version)
    (version / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def choose_rows(most: int | None, asked: int | None, name: str) -> int:
    """The most rows of a batch of requests; 0 for no batching. `most` is the result of `find_rows`.

    Raises MisuseError for more rows than the engines take.
    """
    if asked and most and asked > most:
        raise MisuseError(f"--batch {asked}: the engines of {name} were built for {most} rows at most")
    if asked is not None:
        return asked
    return 0 if most is None else min(most or MOST_ROWS, MOST_ROWS)
