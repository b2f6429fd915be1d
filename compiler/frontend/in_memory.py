"""Writes a model in memory to a temporary file, since splitc reads files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import finalize

import onnx
import onnx_ir as ir

from splitc.compiler.errors import ModelError
from splitc.runtime.errors import MisuseError

# The types of a given model.
Given = str | Path | onnx.ModelProto | ir.Model


class ModelFile:
    """The file of a model: its own, or one in a temporary folder.

    As a context, the folder exists until its end, or as long as the object that was given to `keep`.
    """

    def __init__(self, model: Given) -> None:
        if not isinstance(model, str | Path | onnx.ModelProto | ir.Model):
            raise MisuseError(
                f"a model is a path, an onnx.ModelProto or an onnx_ir.Model, and this is of type {type(model).__name__}"
            )
        self._model = model
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> ModelFile:
        if isinstance(self._model, str | Path):
            self.path = Path(self._model)
            return self
        self._folder = TemporaryDirectory(prefix="splitc-")
        self.path = Path(self._folder.name) / "model.onnx"
        try:
            _write(self._model, self.path)
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def keep(self, user: object) -> None:
        """Keep the file as long as `user` exists, which reads the weights later."""
        if self._folder is not None:
            finalize(user, self._folder.cleanup)
            self._folder = None

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


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
