"""The file that tells a server how to open a package. An export writes it, and users may edit it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.json import Decoder

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import indented
from splitc.runtime.package.manifest import Manifest

FILE_NAME = "serving.json"


class Serving(Struct, frozen=True, forbid_unknown_fields=True):
    """How a server opens a package, and keeps its sequences.

    Paths are relative to this file.

    - `package`: the package's folder. `tokenizer`: its folder, for a server of texts.
    - `sequences`: states stay on the ranks, and clients neither send nor receive them. A sequence ends when it was idle
      for `idle_seconds`. At most `most_sequences` are open, unless the server itself limits their number.
    - `capacity`: that of `Session.start`. `context`: the most tokens of a prompt with its answer.
    - `adapters`: files that requests may ask for, by name; `unet=FILE` is a file's part for one model.

    The other fields are arguments of `Session`.
    """

    package: str
    sequences: bool = False
    idle_seconds: float = 300.0
    most_sequences: int = 64
    capacity: int | None = None
    devices: list[str] = []
    threads: int | None = None
    in_flight: int | None = None
    ranks: str | None = None
    verify: str = "once"
    cuda_graphs: bool = True
    host_code: bool = False
    adapters: dict[str, str] = {}
    tokenizer: str | None = None
    context: int | None = None

    def of(self, manifests: Sequence[Manifest], sequences: bool | None) -> list[Serving]:
        """The same for each package. Its requests are sequences as asked, or by default (None) if it has caches.

        Other states count only if asked for, as they may just be an input and an output of one shape. Raises
        MisuseError for a capacity without sequences.
        """
        servings = []
        for manifest in manifests:
            caches = any(state.grows is not None for state in manifest.states)
            servings.append(msgspec.structs.replace(self, sequences=caches if sequences is None else sequences))
        if self.capacity is not None and not any(serving.sequences for serving in servings):
            raise MisuseError(f"--capacity {self.capacity} is for requests that are sequences, and there are none")
        return servings


_SERVINGS = Decoder(Serving)


def write_serving(folder: Path, serving: Serving) -> None:
    """Write the file into the folder."""
    (folder / FILE_NAME).write_bytes(indented(serving))


def read_serving(path: Path) -> Serving:
    """Read the file. Raises MisuseError if it can't be read, with the field that is wrong."""
    try:
        return _SERVINGS.decode(path.read_bytes())
    except OSError as error:
        raise MisuseError(f"can't read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise MisuseError(f"{path}: {error}: correct it, or export the package again") from error
