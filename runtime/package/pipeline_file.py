"""The file of a pipeline: a package of several models, its modules, and the other files that their program needs.

Each module is a package of its own, in a folder with the module's name. Other files (tokenizers, configs, schedulers)
have the paths that they had in the models' folder.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.json import Decoder

from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.package.checks import is_inside
from splitc.runtime.package.manifest import File
from splitc.runtime.package.manifest_file import read_manifest, read_seal, read_sealed, seal

FILE_NAME = "pipeline.json"
SCHEMA = 1


class Module(Struct, frozen=True):
    """A module. `seal` is the hash of its manifest, `source` its model's path in the models' folder."""

    name: str
    seal: str
    source: str


class PipelineFile(Struct, frozen=True):
    """The modules of a package, and the files beside them. `swap`: they were planned to work in turn."""

    modules: list[Module]
    files: list[File]
    schema: int = SCHEMA
    swap: bool = False

    def find(self, name: str) -> Module | None:
        """The module of this name; None if there is none."""
        return next((module for module in self.modules if module.name == name), None)


_PIPELINES = Decoder(PipelineFile)


def write_pipeline(package: Path, pipeline: PipelineFile) -> None:
    """Write the file of a pipeline, whose modules and files are there."""
    (package / FILE_NAME).write_bytes(seal(msgspec.json.encode(pipeline)))


def read_pipeline(package: Path) -> PipelineFile | None:
    """Read the file of a pipeline; None for a package of one model.

    Raises PackageError for one that this version can't read or trust.
    """
    pipeline = read_sealed(package / FILE_NAME, _PIPELINES, [SCHEMA])
    if pipeline is not None:
        places = [place for module in pipeline.modules for place in (module.name, module.source)]
        if outside := [path for path in (*places, *(file.path for file in pipeline.files)) if not is_inside(path)]:
            raise PackageError(f"{package / FILE_NAME} names '{outside[0]}', which lies outside the package")
    return pipeline


def find_module(package: Path, module: str | None) -> Path:
    """The folder of a module's own package: that of `package` itself, if it has one model and no modules.

    The only module need not be named. Raises MisuseError for a module that is not there, and if there are several and
    none is named; PackageError for one that is not of this pipeline.
    """
    pipeline = read_pipeline(package)
    if pipeline is None:
        if module is not None:
            read_manifest(package)
            raise MisuseError(
                f"{package} is the package of one model, and has no module '{module}': leave --module out"
            )
        return package
    names = ", ".join(known.name for known in pipeline.modules)
    if module is None and len(pipeline.modules) == 1:
        module = pipeline.modules[0].name
    if module is None:
        raise MisuseError(f"{package} has several models: say which, with --module ({names})")
    known = pipeline.find(module)
    if known is None:
        raise MisuseError(f"{package} has no module '{module}': there are {names} (--module)")
    folder = package / known.name
    if read_seal(folder) != known.seal:
        raise PackageError(f"{folder} is not the module that {package} was compiled with: compile the models again")
    return folder
