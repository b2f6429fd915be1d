"""The C library of operators for collectives inside engines. It is built on installation if there is a C compiler."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from splitc.runtime.errors import EngineError, PackageError

MODULE = "splitc.runtime.collectives._operators"
# That of native/library.c. An editable install may have a library of older sources than its Python code.
INTERFACE = 9
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
# The types of its functions, which are defined in native/library.c.
_FUNCTIONS = {
    "splitc_interface": (_INT, []),
    "splitc_meeting_bytes": (_SIZE, [_INT, _SIZE]),
    "splitc_meeting_init": (None, [_POINTER, _INT, _SIZE]),
    "splitc_meeting_init_post": (None, [_POINTER, _INT, _POINTER]),
    "splitc_meeting_abort": (None, [_POINTER]),
    "splitc_end_of_meeting": (_POINTER, [_POINTER, _INT, ctypes.c_double]),
    "splitc_end_of_nccl": (_POINTER, [_POINTER]),
    "splitc_end_release": (None, [_POINTER]),
    "splitc_kernel_sum": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _SIZE, _POINTER]),
    "splitc_end_connect": (None, [_POINTER, _POINTER, _POINTER]),
    "splitc_end_on_gpu": (None, [_POINTER, _POINTER, _POINTER]),
    "splitc_end_register": (None, [_POINTER]),
    "splitc_fused_make": (_POINTER, [_POINTER, _INT, _INT, _POINTER]),
    "splitc_fused_register": (None, [_POINTER]),
    "splitc_fused_release": (None, [_POINTER]),
    "splitc_begin": (None, [_POINTER, ctypes.c_uint64]),
    "splitc_fail": (_INT, [_POINTER, ctypes.c_uint64]),
    "splitc_end_transfers": (None, [_POINTER, _POINTER, _INT, ctypes.c_double, _POINTER, _POINTER]),
    "splitc_all_reduce": (_INT, [_POINTER, _INT, _INT, _POINTER, _POINTER, _SIZE]),
}


def is_built() -> bool:
    """Whether engines of ONNX Runtime can have collectives inside on this machine."""
    return find_spec(MODULE) is not None


def library_path() -> Path:
    """The library's file. Raises PackageError if it was not built, or from other sources."""
    load_library()
    return _find_library()


def _find_library() -> Path:
    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise PackageError(
            "these engines have collectives inside, for which they need splitc's C library, and this machine has none: "
            "install a C compiler (gcc or clang), then install splitc again. Or compile the model on this machine: "
            "without the library, engines are cut at their collectives."
        )
    return Path(spec.origin)


@cache
def load_library() -> ctypes.CDLL:
    """The library, with its functions' types. Raises PackageError if it was not built, or from other sources."""
    path = _find_library()
    library = ctypes.CDLL(str(path))
    interface = library.splitc_interface() if hasattr(library, "splitc_interface") else 0
    if interface != INTERFACE:
        raise PackageError(
            f"splitc's C library has interface {interface}, and its Python code needs {INTERFACE}: the sources have "
            f"changed since {path} was built. Install splitc again, as it was installed (pip install --editable .)"
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        if result is _POINTER:
            function.errcheck = _need_memory
    return library


def _need_memory(made: int | None, function: object, arguments: object) -> int:
    """Return the pointer. Raises EngineError if it is null: the function had no memory."""
    if made is None:
        raise EngineError("this machine has no memory left for the collectives inside engines")
    return made
