"""Models that are not ONNX files yet: optimum exports them, if it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from splitc.compiler.errors import ModelError
from splitc.runtime.errors import needed
from splitc.runtime.files.written import read_config

NEEDS = "--export needs optimum's exporter: pip install optimum-onnx transformers torch"


@contextmanager
def exported(model: str, package: Path) -> Iterator[Path]:
    """The folder of ONNX files that optimum exports from a folder of transformers or diffusers, or from an id on a Hub.

    It is beside the package, on the same disk, and is deleted at the end. Raises MisuseError if optimum is not
    installed, ModelError for a model that it can't export.
    """
    with needed(NEEDS):
        from optimum.exporters.onnx import main_export
    with TemporaryDirectory(prefix=f".{package.name}-exported-", dir=package.absolute().parent) as folder:
        try:
            with redirect_stdout(sys.stderr):  # standard output is for the command's result
                main_export(model, output=folder, task=_find_task(Path(model)))
        except Exception as error:  # any error of any of its libraries
            raise ModelError(f"optimum can't export {model}: {type(error).__name__}: {error}") from error
        yield Path(folder)


def _find_task(folder: Path) -> str:
    """optimum's name for the task of a folder's model, with caches if it has any. "auto" for an id on a Hub.

    The configs name the model's class.
    """
    if not folder.is_dir():
        return "auto"
    import transformers
    from optimum.exporters.tasks import TasksManager

    if (index := folder / "model_index.json").is_file():
        import diffusers

        kind = getattr(diffusers, read_config(index)["_class_name"])
        return str(TasksManager.infer_task_from_model(kind))
    config = transformers.AutoConfig.from_pretrained(str(folder))
    if not config.architectures:
        raise ModelError(f"the config.json of {folder} has no architectures")
    task = str(TasksManager.infer_task_from_model(getattr(transformers, config.architectures[0])))
    known = TasksManager.get_supported_tasks_for_model_type(config.model_type, "onnx", library_name="transformers")
    return f"{task}-with-past" if f"{task}-with-past" in known else task
