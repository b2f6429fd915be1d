"""Split one ONNX model over several devices, and write the package that `splitc.runtime` runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitc.compiler.api import plan_model
    from splitc.compiler.packaging.package import compile_model
    from splitc.compiler.planning.plan import Plan
    from splitc.compiler.planning.plan_request import Request

__all__ = ["Plan", "Request", "compile_model", "plan_model"]

_HOMES = {
    "Plan": "planning.plan",
    "Request": "planning.plan_request",
    "compile_model": "packaging.package",
    "plan_model": "api",
}


def __getattr__(name: str) -> Any:
    """Import public names, and with them the compiler's libraries, on first use: `--help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
