"""Splits ONNX models over several devices, and writes the package that `splitc.runtime` runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitc.runtime.threads.garbage import rare_garbage

if TYPE_CHECKING:
    from splitc.compiler.api import plan_model
    from splitc.compiler.packaging.package import compile_model
    from splitc.compiler.pipelines.placement import plan_pipeline
    from splitc.compiler.pipelines.writer import compile_pipeline
    from splitc.compiler.planning.plan import Plan
    from splitc.compiler.request.request import Request

__all__ = ["Plan", "Request", "compile_model", "compile_pipeline", "plan_model", "plan_pipeline"]

_HOMES = {
    "Plan": "planning.plan",
    "Request": "request.request",
    "compile_model": "packaging.package",
    "compile_pipeline": "pipelines.writer",
    "plan_model": "api",
    "plan_pipeline": "pipelines.placement",
}


def __getattr__(name: str) -> Any:
    """Import public names, and with them the compiler's libraries, on first use: `--help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with rare_garbage():  # what is imported stays: looking for garbage in it takes a sixth of the time
        home = import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
