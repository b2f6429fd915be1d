"""Results of earlier trials, in the user's cache: a form is tried once per version of splitc and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

import msgspec
import onnxruntime as ort
from blake3 import blake3
from msgspec import Struct

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.cache import read_cache, write_cache
from splitc.runtime.version import VERSION

# The cache's file of trials.
FILE = "trials.json"
# The most trials in a cache; with more, it is dropped as a whole. A choice: such a file takes 2 ms to read, and a model
# adds hundreds.
MOST = 20_000
# The rooms whose code decides the results.
ROOMS = ("operators", "sharding", "lowering", "trials")


class Trials(Struct, frozen=True):
    """The result for each form, by digest, with these versions: empty if its rule holds, else the error."""

    versions: str = ""
    results: dict[str, str] = {}


def known_trials() -> Mapping[str, str]:
    """The results of earlier trials with the same code."""
    with suppress(msgspec.DecodeError):
        trials = _decoded(read_cache(FILE))
        if trials.versions == _versions():
            return trials.results
    return {}


@lru_cache(maxsize=1)
def _decoded(content: bytes) -> Trials:
    """The content of the file. A plan reads it several times."""
    return msgspec.json.decode(content, type=Trials)


def keep_trials(results: Mapping[str, str]) -> None:
    """Add results to those of earlier trials. If the cache can't be written, forms are tried again next time."""
    both = {**known_trials(), **results}
    if len(both) > MOST:
        both = dict(results)
    with suppress(MisuseError):
        write_cache(FILE, msgspec.json.encode(Trials(_versions(), both)))


@cache
def _versions() -> str:
    """The versions of splitc and ONNX Runtime, and a hash of the code in ROOMS."""
    folder = Path(__file__).resolve().parent.parent
    code = blake3()
    for path in sorted(path for room in ROOMS for path in (folder / room).glob("*.py")):
        code.update(path.read_bytes())
    return f"{VERSION} {ort.__version__} {code.hexdigest()[:16]}"
