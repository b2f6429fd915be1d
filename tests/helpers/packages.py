"""Packages of a model in each split mode, which tests share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from splitc.compiler import Request, compile_model, plan_model

MODES = {
    "layer": ("3xcpu", Request()),
    "row": ("3xcpu", Request(split_mode="row", row_min=16)),
    "tensor": ("2xcpu", Request(split_mode="tensor")),
    "more ranks than heads": ("3xcpu", Request(split_mode="tensor")),
    "tensor in layers": ("4xcpu", Request(split_mode="tensor", pipeline_stages=2)),
    "one device": ("cpu0", Request()),
}


@cache
def compile_mode(model: Path, mode: str) -> Path:
    """The package of the model in one of the MODES, beside the model."""
    devices, request = MODES[mode]
    package = model.with_name(f"{model.stem}-{mode.replace(' ', '-')}-{devices}")
    compile_model(plan_model(model, [devices], request), package)
    return package
