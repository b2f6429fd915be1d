"""What came of earlier trials, in the user's cache: a form is tried once for each version of splitc and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
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
# More are forgotten all together: a file of so many takes 2 ms to read.
MOST = 20_000
# The rooms whose code decides what a trial shows.
ROOMS = ("operators", "sharding", "lowering", "trials")


class Trials(Struct, frozen=True):
    """What came of each form, by its digest, with these versions: empty if its rule holds, else what went wrong."""

    versions: str = ""
    results: dict[str, str] = {}


def known_trials() -> Mapping[str, str]:
    """The results of earlier trials with the same code."""
    with suppress(msgspec.DecodeError):
        trials = msgspec.json.decode(read_cache(FILE), type=Trials)
        if trials.versions == _versions():
            return trials.results
    return {}


def keep_trials(results: Mapping[str, str]) -> None:
    """Add results to those of earlier trials. Without a cache that can be written, forms are tried again."""
    both = {**known_trials(), **results}
    if len(both) > MOST:
        both = dict(results)
    with suppress(MisuseError):
        write_cache(FILE, msgspec.json.encode(Trials(_versions(), both)))


@cache
def _versions() -> str:
    """The versions of splitc and ONNX Runtime, and a hash of the code that decides."""
    folder = Path(__file__).resolve().parent.parent
    code = blake3()
    for path in sorted(path for room in ROOMS for path in (folder / room).glob("*.py")):
        code.update(path.read_bytes())
    return f"{VERSION} {ort.__version__} {code.hexdigest()[:16]}"
