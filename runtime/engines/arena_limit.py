"""A limit for the memory that an ONNX Runtime session allocates."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import onnxruntime as ort

from splitc.runtime.hardware.control_groups import memory_limit
from splitc.runtime.units import format_bytes

# Registered arenas belong to the process: none may be registered between one and its session.
_REGISTERING = threading.Lock()
# ONNX Runtime's message for an arena at its limit, on CPUs and on GPUs.
_FULL = re.compile(r"Available memory of (\d+) is smaller than requested bytes of (\d+)")


@contextlib.contextmanager
def limited_arena(limit: int | None) -> Iterator[None]:
    """Give the sessions that are opened inside, and use the process's arena, one new arena of at most `limit` bytes.

    Weights count too. Without a limit nothing changes. On the CPU a session's own arena can't be limited, only the
    process's, which is replaced for later sessions. Meanwhile only this thread may open sessions that use it.
    """
    if limit is None:
        yield
        return
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with _REGISTERING:
        ort.create_and_register_allocator(where, _config(limit))
        try:
            yield
        finally:
            ort.create_and_register_allocator(where, _config(0))  # unregisters the sessions' arena


def _begin_anew() -> None:
    """Free the lock in a forked process, which has no thread that opens a session."""
    global _REGISTERING
    _REGISTERING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def take_limited_arena(options: ort.SessionOptions) -> None:
    """Let a session with these options use the process's arena."""
    options.add_session_config_entry("session.use_env_allocators", "1")


def _config(limit: int) -> ort.OrtArenaCfg:
    """ONNX Runtime's defaults, with this limit; 0 for no limit."""
    defaults = {"arena_extend_strategy": 0, "initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": -1}
    return ort.OrtArenaCfg({"max_mem": limit, **defaults})


def host_limit(limit: int | None) -> int | None:
    """The limit of a CPU rank: at most the free memory of this process's container."""
    free = memory_limit()[1]
    return limit if math.isinf(free) else int(free) if limit is None else min(limit, int(free))


def beyond_limit(message: str, limit: int | None, values: Mapping[str, Any]) -> str | None:
    """The error text, if ONNX Runtime's message says that its arena is at the limit; None for other messages.

    `values` are the engine's inputs. The text gives the names and shapes of the largest.
    """
    full = _FULL.search(message)
    if full is None or limit is None:
        return None
    free, wanted = map(int, full.groups())
    shapes = {name: tuple(_shape(value)) for name, value in values.items()}
    largest = sorted(shapes, key=lambda name: -math.prod(shapes[name]))[:3]
    named = ", ".join(f"{name} {' x '.join(map(str, shapes[name])) or 'scalar'}" for name in largest)
    return (
        f"the request needs more memory than the budget leaves: weights and values may take {format_bytes(limit)}, "
        f"{format_bytes(free)} of it are free, and {format_bytes(wanted)} are needed, for inputs such as {named}. Give "
        "smaller inputs, or compile for these with a larger budget (--memory)"
    )


def _shape(value: Any) -> tuple[int, ...]:
    shape = value.shape
    return tuple(shape() if callable(shape) else shape)
