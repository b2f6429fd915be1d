"""Writes a model in memory to a temporary file, since splitc reads files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol
from weakref import finalize

import onnx
import onnx_ir as ir

from splitc.compiler.errors import ModelError
from splitc.runtime.errors import MisuseError


class HoldsModel(Protocol):
    """What torch.onnx.export returns: an ONNXProgram."""

    @property
    def model(self) -> ir.Model:
        """The exported model."""


# The types of a given model.
Given = str | Path | onnx.ModelProto | ir.Model | HoldsModel


@contextmanager
def model_file(model: Given) -> Iterator[tuple[Path, Callable[[object], object]]]:
    """The path of a model's file: its own, or one in a temporary folder, which exists inside the context.

    The second result is a function that keeps the folder as long as an object exists, which reads the weights later.
    """
    if isinstance(model, str | Path):
        yield Path(model), lambda user: None
        return
    if isinstance(held := getattr(model, "model", None), ir.Model):
        model = held
    if not isinstance(model, onnx.ModelProto | ir.Model):
        raise MisuseError(
            "a model is a path, an onnx.ModelProto, an onnx_ir.Model or torch's ONNXProgram, and this is of type "
            f"{type(model).__name__}"
        )
    with ExitStack() as stack:
        path = Path(stack.enter_context(TemporaryDirectory(prefix="splitc-")), "model.onnx")
        _write(model, path)
        yield path, lambda user: finalize(user, stack.pop_all().close)


def _write(model: onnx.ModelProto | ir.Model, path: Path) -> None:
    """Write a model, with its weights beside it. Raises ModelError if it can't be read."""
    try:
        read = model if isinstance(model, ir.Model) else ir.serde.deserialize_model(model)
        ir.save(read, path, external_data=f"{path.name}.data")
    except FileNotFoundError as error:
        raise ModelError(
            f"the model's weights are in a file that is not there from here ({error.filename}): give the model's path "
            "instead, or load its weights too"
        ) from error
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the model can't be written to a file: {error}") from error
