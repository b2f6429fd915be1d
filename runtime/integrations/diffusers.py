"""diffusers' own pipelines, run on a package."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitc.runtime.errors import MisuseError, needed
from splitc.runtime.files.written import read_config
from splitc.runtime.integrations.arguments import FORWARD
from splitc.runtime.package.pipeline_file import PipelineFile, read_pipeline
from splitc.runtime.session.pipeline import Pipeline
from splitc.runtime.session.session import Session

INDEX, CONFIG = "model_index.json", "config.json"
NEEDS = "diffusers' pipelines need diffusers, transformers and torch: pip install splitc[diffusers]"
# Modules that are one method of a component: `vae_encoder` is the `encode` of `vae`.
METHODS = {"_encoder": "encode", "_decoder": "decode"}


def load(package: str | Path, *, own: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), **options: Any) -> Any:
    """diffusers' pipeline of a package that was compiled from a folder with a model_index.json.

        pipeline = load("package")
        pipeline("an astronaut on a horse", num_inference_steps=20).images[0].save("image.png")

    The pipeline has the class that model_index.json names. Its models are the package's sessions. Tokenizers, the
    scheduler and other components are loaded from files in the package. `options` that are arguments of `Session` go to
    all sessions, and `own` has those of single modules, as in `Pipeline`. All others go to
    `DiffusionPipeline.from_pretrained`: a component given there replaces the package's. The sessions are closed when
    the pipeline is garbage-collected.

    Raises as Session does, and MisuseError if diffusers is not installed, for a package that is no pipeline of
    diffusers, and for one that lacks a model that the pipeline needs.
    """
    path = Path(package)
    read, kind, components = _read_package(path)
    places = {module.name: _find_place(module.name, components) for module in read.modules}
    with needed(NEEDS):
        import diffusers

        from splitc.runtime.integrations.diffusers_parts import find_class, make_part, with_adapters
    of_sessions = {name: options.pop(name) for name in _session_options() & options.keys()}
    sessions = Pipeline(path, own=own, **of_sessions)
    try:
        parts: dict[str, Any] = {}
        for component, names in components.items():
            methods = {method: sessions[name] for name, (of, method) in places.items() if of == component}
            if methods and component not in options:
                folders = [Path(module.source).parent for module in read.modules if places[module.name][0] == component]
                config = _find_config(path, component, folders)
                parts[component] = make_part(find_class(*names), config, component, methods)
        _check_complete(path, components, {*parts, *options})
        # The pipeline's own class knows which models are optional; the base class does not count these as models.
        own_class = getattr(diffusers, kind, diffusers.DiffusionPipeline)
        return with_adapters(own_class.from_pretrained(str(path), **parts, **options))
    except BaseException:
        sessions.close()
        raise


def _session_options() -> set[str]:
    """The options of sessions, without those that select the model."""
    return inspect.signature(Session).parameters.keys() - {"package", "module"}


def _read_package(package: Path) -> tuple[PipelineFile, str, dict[str, tuple[str, str]]]:
    """A package's modules, its pipeline's class, and its components: names, libraries and classes."""
    read = read_pipeline(package)
    index = package / INDEX
    if read is None or not index.is_file():
        raise MisuseError(
            f"{package} has no {INDEX}: compile the folder of a pipeline that diffusers or optimum wrote, which has one"
        )
    values = read_config(index)
    components = {
        name: (value[0], value[1])
        for name, value in values.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    }
    return read, str(values.get("_class_name")), components


def _find_place(module: str, components: Collection[str]) -> tuple[str, str]:
    """The component that a module belongs to, and the method that it replaces."""
    if module in components:
        return module, FORWARD
    for ending, method in METHODS.items():
        if module.endswith(ending) and (component := module.removesuffix(ending)) in components:
            return component, method
    raise MisuseError(
        f"{INDEX} has no component for the module '{module}': compile without it (--module). It has "
        f"{', '.join(components)}"
    )


def _find_config(package: Path, component: str, folders: Collection[Path]) -> Path:
    """The folder with a component's config: that of one of its models, or the component's own."""
    for folder in (*folders, Path(component)):
        if (package / folder / CONFIG).is_file():
            return package / folder
    raise MisuseError(f"{package} has no {CONFIG} for {component}: one belongs beside the model, before it is compiled")


def _check_complete(package: Path, components: Collection[str], known: Collection[str]) -> None:
    """Raise MisuseError if a component is a model that the package lacks.

    A component with a config.json, or without a folder, is a model. Others are loaded from their files.
    """
    for name in components:
        if name not in known and (not (package / name).is_dir() or (package / name / CONFIG).is_file()):
            raise MisuseError(
                f"{package} has no module for {name}, which is in its {INDEX}: export and compile it too, or give it "
                f"to the pipeline, load(..., {name}=model). With {name}=None the pipeline does without it, if it can"
            )
