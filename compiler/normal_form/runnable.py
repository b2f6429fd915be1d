"""Replaces what only kernels of GPUs take: splitc tries and compares models on CPUs, and packages may run there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.normal_form.channels_first import put_channels_first
from splitc.compiler.normal_form.kernel_layouts import unpack_weights
from splitc.compiler.normal_form.query_norms import take_out_norms
from splitc.compiler.reading.external_data import load_settled, saved

_CHANGED = "splitc.made_runnable"


def make_runnable(model: ir.Model) -> None:
    """Give nodes that CPUs have no kernel for a form that they have one for, in place."""
    if any([take_out_norms(model), unpack_weights(model), put_channels_first(model)]):
        model.meta[_CHANGED] = True


@contextmanager
def runnable_file(model: ir.Model, path: Path) -> Iterator[tuple[Path, bool]]:
    """A file of the model that CPUs can run, for the time of the context, and whether it is the model's own file.

    `model` is that of the file at `path`, after `make_runnable`.
    """
    if _CHANGED not in model.meta:
        yield path, True
        return
    copy = load_settled(path)
    make_runnable(copy)
    with saved(copy, "model") as made:
        yield made, False
