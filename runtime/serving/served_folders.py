"""Folders for servers, written atomically, with hard links to packages' files where possible."""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitc.runtime.adapters.adapter_files import find_file
from splitc.runtime.adapters.asked import split_part
from splitc.runtime.adapters.held import KeptSums
from splitc.runtime.adapters.loaded import Adapters
from splitc.runtime.adapters.peft_config import CONFIG
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import link_file
from splitc.runtime.files.written_folder import written_folder
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import FILE_NAME, read_manifest
from splitc.runtime.package.pipeline_file import find_module, read_pipeline
from splitc.runtime.package.verification import check_unread
from splitc.runtime.serving.serving_file import Serving, write_serving
from splitc.runtime.threads.progress import Bytes, counting


@dataclass(frozen=True)
class ServedModel:
    """A model of a server: its name, its package's folder, and the manifest."""

    name: str
    package: Path
    manifest: Manifest


def find_models(package: Path, module: str | None, name: str | None) -> list[ServedModel]:
    """The models to export: one, which may be called `name`, or each module of a pipeline.

    Raises PackageError and MisuseError as `find_module` does, and for a name of several.
    """
    pipeline = read_pipeline(package)
    if pipeline is None or module is not None:
        folders = {module or package.resolve().name: find_module(package, module)}
    else:
        folders = {model.name: find_module(package, model.name) for model in pipeline.modules}
    if name is not None:
        if len(folders) > 1:
            raise MisuseError(f"--name is for one model, and {package} has {len(folders)}: add --module")
        folders = dict.fromkeys([name], *folders.values())
    for model in folders:
        if not model or model != Path(model).name or model.startswith(".") or not model.isprintable():
            raise MisuseError(f"{model!r} can't be a model's name, which is that of a folder: give another --name")
    return [ServedModel(model, folder, read_manifest(folder)) for model, folder in folders.items()]


@contextmanager
def new_models(target: Path, names: Iterable[str]) -> Iterator[list[Path]]:
    """New folders of these names in the folder `target`. It is made if it is not there, and then removed on errors."""
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisuseError(f"can't write into {target}: {error.strerror}") from error
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(new_folder(target / name)) for name in names]
    except BaseException:
        with suppress(OSError):  # another process has written into it meanwhile
            for folder in made:
                folder.rmdir()
        raise


def new_folder(target: Path) -> AbstractContextManager[Path]:
    """A folder that becomes `target` if the block succeeds: see `written_folder`. Nothing may be there before."""
    _check_new(target)  # which may be a link to nothing
    return written_folder(target, _check_new)


def _check_new(target: Path) -> None:
    if os.path.lexists(target):
        raise MisuseError(f"{target} exists already: remove it, or choose another name")
    if not target.absolute().parent.is_dir():
        raise MisuseError(f"there is no folder {target.absolute().parent} to write {target.name} into")


def put_package(model: ServedModel, serving: Serving, folder: Path) -> None:
    """Put a model's package into the folder that a server opens it from, with its adapters and the file that says how.

    Raises as `link_package` and `link_adapters`.
    """
    link_package(model.package, model.manifest, folder / serving.package)
    linked = link_adapters(serving.adapters, model.manifest, folder)
    write_serving(folder, msgspec.structs.replace(serving, adapters=linked))


def link_adapters(adapters: Mapping[str, str], manifest: Manifest, folder: Path) -> dict[str, str]:
    """Put adapters beside a package in the folder, with PEFT's config. Returns their files, relative to the folder.

    A file's part for one model, as in `unet=FILE`, is that of the file in the folder.
    Raises MisuseError as `Adapters.load`, and for a name that a request can't give.
    """
    known, linked = Adapters(manifest.slots, KeptSums(itertools.count(), deque(), None)), {}
    for name, text in adapters.items():
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise MisuseError(f"{name!r} can't be an adapter's name: it has letters, digits, dots and hyphens")
        known.load(name, text)
        part, path = split_part(text)
        file = find_file(Path(path))
        place = folder / "adapters" / name
        place.mkdir(parents=True)
        for source in filter(Path.is_file, (file, file.with_name(CONFIG))):
            link_file(source, place / source.name)
        linked[name] = f"{'' if part is None else f'{part}='}adapters/{name}/{file.name}"
    return linked


def link_package(package: Path, manifest: Manifest, target: Path) -> None:
    """Make `target` the same package, with hard links to its files, or copies on another file system.

    Raises PackageError for a package that is incomplete. Hashes are compared when the package is loaded.
    """
    for file in manifest.files:
        check_unread(package, file)
    add = counting("writing files", Bytes(sum(file.bytes for file in manifest.files)))
    for name, size in ((FILE_NAME, 0), *((file.path, file.bytes) for file in manifest.files)):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link_file(package / name, place)
        add(size)
