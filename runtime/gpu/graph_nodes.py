"""The copies from host memory in a captured CUDA graph, from CUDA's driver, since CuPy does not list them.

The structures and the numbers are those of cuda.h (CUDA_MEMCPY3D_v2, CUgraphNodeType, CUmemorytype).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.errors import EngineError

_COPY, _GRAPH = 1, 4
_HOST, _DEVICE, _UNIFIED = 1, 2, 4
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE

Bytes = npt.NDArray[np.uint8]


class End(ctypes.Structure):
    """One end of a copy."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("z", ctypes.c_size_t),
        ("level", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Copy(ctypes.Structure):
    """The copy of a node."""

    _fields_ = (
        ("source", End),
        ("target", End),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(f"CUDA's driver can't be asked what a graph copies: {error}") from error


def own_what_is_copied(graph: Any, known: Sequence[npt.NDArray[Any]], pinned: Callable[[int], Bytes]) -> list[Bytes]:
    """Replace the engines' pinned memory that a graph copies from by memory of the graph's own.

    Engines reuse theirs after the run. Returns the new memory, which must live as long as the graph. `known` is memory
    that may stay, `pinned` allocates new memory.

    Raises EngineError if the graph copies from unpinned host memory, which may be freed already, or to the host, and if
    CuPy did not keep the graph: before version 14 it keeps only the instance.
    """
    if not graph.graph:
        raise EngineError(
            "CuPy before version 14 keeps no graph that can be looked at: pip install --upgrade cupy-cuda12x"
        )
    owned = []
    places = [range(memory.ctypes.data, memory.ctypes.data + memory.nbytes) for memory in known]
    for node, copy, is_inside in _copies(graph.graph):
        source, target = (_address(end, places) for end in (copy.source, copy.target))
        if source is None and target is None:
            continue
        is_plain = copy.height <= 1 and copy.depth <= 1 and not is_inside
        if source is None or target is not None or not is_plain or _memory_type(source) != _HOST:
            raise EngineError("an engine copies between the GPU and memory of the host")
        memory = pinned(copy.width)
        ctypes.memmove(memory.ctypes.data, source, copy.width)
        _replace(graph.graphExec, node, copy, memory)
        owned.append(memory)
    return owned


def _copies(graph: int, is_inside: bool = False) -> Iterator[tuple[ctypes.c_void_p, Copy, bool]]:
    """The copies of a graph and of its child graphs: the nodes, and whether they are in a child graph."""
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        _call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    for node in map(ctypes.c_void_p, nodes):
        kind, inner, copy = ctypes.c_int(), ctypes.c_void_p(), Copy()
        _call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == _GRAPH:
            _call("cuGraphChildGraphNodeGetGraph", node, ctypes.byref(inner))
            yield from _copies(inner.value or 0, True)
        elif kind.value == _COPY:
            _call("cuGraphMemcpyNodeGetParams", node, ctypes.byref(copy))
            yield node, copy, is_inside


def _address(end: End, known: Sequence[range]) -> int | None:
    """The host address of this end of a copy; None if it is on a device, or in known memory."""
    if end.kind == _HOST:
        address = (end.host or 0) + end.x
    elif end.kind == _UNIFIED and _memory_type(end.device) != _DEVICE:
        address = end.device + end.x
    else:
        return None
    return None if any(address in place for place in known) else int(address)


def _memory_type(address: int) -> int:
    """The type of memory; 0 for memory of the host that CUDA does not know."""
    kind = ctypes.c_int()
    unknown = _driver().cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
    return 0 if unknown else kind.value


def _replace(instance: int, node: ctypes.c_void_p, copy: Copy, source: Bytes) -> None:
    """Make a copy node of an instantiated graph read from other host memory."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    copy.source.x, copy.source.kind, copy.source.host = 0, _HOST, source.ctypes.data
    _call("cuGraphExecMemcpyNodeSetParams", ctypes.c_void_p(instance), node, ctypes.byref(copy), context)


def _call(function: str, *arguments: Any) -> None:
    if code := getattr(_driver(), function)(*arguments):
        raise EngineError(f"CUDA's {function} failed with code {code}")
