"""The C library with the operators that engines meet in. It is built where splitc is installed, if there is a compiler."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from splitc.runtime.errors import PackageError

MODULE = "splitc.runtime.collectives._operators"
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
# What its functions take and return; `native/operators.c` says what they do.
_FUNCTIONS = {
    "splitc_meeting_bytes": (_SIZE, [_INT, _SIZE]),
    "splitc_meeting_init": (None, [_POINTER, _INT, _SIZE]),
    "splitc_meeting_abort": (None, [_POINTER]),
    "splitc_end_of_meeting": (_POINTER, [_POINTER, _INT, ctypes.c_double]),
    "splitc_end_free": (None, [_POINTER]),
    "splitc_end_register": (None, [_POINTER]),
    "splitc_begin": (None, [_POINTER]),
    "splitc_fail": (None, [_POINTER]),
    "splitc_all_reduce": (_INT, [_POINTER, _INT, _INT, _POINTER, _POINTER, _SIZE]),
}


def find_library() -> Path | None:
    """The library's file; None where it was not built."""
    spec = find_spec(MODULE)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def is_built() -> bool:
    """Whether ONNX Runtime's engines can sum over ranks while they run, on this machine."""
    return find_library() is not None


@cache
def load_library() -> ctypes.CDLL:
    """The library. Raises PackageError where it was not built."""
    path = find_library()
    if path is None:
        raise PackageError(
            "these engines sum over ranks while they run, which takes splitc's C library, and that was not built when "
            "splitc was installed here: install a C compiler (gcc) and then splitc again, or compile the model on this "
            "machine, which cuts engines at their sums"
        )
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
