"""A user's request for each module: options with a module's name before them are for that module, others for all.

-d "text_encoder=cuda1,transformer=cuda0&cuda1"    --split-mode transformer=tensor
--shapes transformer.hidden_states:1x4096x64       --set decoder.use_cache_branch=true
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from splitc.compiler.pipelines.folder import FolderModule, ModelFolder
from splitc.compiler.pipelines.names import ALIASES, find_modules, need_modules
from splitc.compiler.request.request import Request, options_of_requests
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device, parse_devices
from splitc.runtime.units import first_few

T = TypeVar("T")


@dataclass(frozen=True)
class ModuleRequest:
    """The request for a module. Without `devices` the planner chooses. `own_mode`: the mode was given for it."""

    module: FolderModule
    request: Request
    devices: tuple[Device, ...] | None
    own_mode: bool


@dataclass(frozen=True)
class PipelineRequest:
    """The requests for all modules. `shared` are the devices of modules without devices of their own.

    `devices` are all devices, once each.
    """

    modules: tuple[ModuleRequest, ...]
    shared: tuple[Device, ...]
    devices: tuple[Device, ...]


def divide_request(folder: ModelFolder, devices: Sequence[str], request: Request) -> PipelineRequest:
    """Divide a request for a folder among its modules.

    Raises MisuseError if a module, an input or a device does not exist.
    """
    own, shared_texts = _divide_devices(folder.names, devices)
    named = parse_devices([*(text for texts in own.values() for text in texts), *shared_texts])
    shared = parse_devices(shared_texts) if shared_texts else named
    mode, modes = _divide_modes(folder.names, request.split_mode)
    keys, options = ("shapes", "min_shapes", "opt_shapes", "max_shapes", "settings", "states"), options_of_requests()
    divided = {key: divide_by_input(folder.modules, getattr(request, key) or {}, options[key].flag) for key in keys}
    adapters = _divide_adapters(folder.names, request.lora)
    modules = []
    for module in folder.modules:
        asked: dict[str, Any] = {key: divided[key][module.name] or getattr(Request(), key) for key in keys}
        asked["lora"] = adapters.get(module.name, ())
        asked["settings"] = {**module.settings, **divided["settings"][module.name]}
        named_devices = own.get(module.name)
        alone = replace(request, **asked).in_mode(modes.get(module.name, mode))
        where = None if named_devices is None else tuple(parse_devices(named_devices))
        if len(folder.modules) > 1 and module.name not in modes and len(where or ()) < 2:
            alone = replace(alone, place=(), experts=None)
        modules.append(ModuleRequest(module, alone, where, module.name in modes))
    _check_modes(request, {module.request.split_mode for module in modules})
    if request.places_weights and not any(module.request.places_weights for module in modules):
        largest = max(folder.modules, key=lambda module: module.facts.weights_bytes)
        raise MisuseError(
            f"{'--place' if request.place else '--experts'} is for single modules of a folder: name the mode of each "
            f"that it is for, as in --split-mode {largest.name}=layer"
        )
    return PipelineRequest(tuple(modules), _distinct(shared), _distinct(sorted(named, key=_place)))


def _check_modes(request: Request, modes: Collection[str]) -> None:
    """Raise MisuseError for an option of a split mode that no module has."""
    for option in request.foreign_options("").values():
        if not set(option.only) & set(modes):
            raise MisuseError(
                f"{option.flag} is for --split-mode {', '.join(option.only)}, which no module has{option.why}"
            )


def _place(device: Device) -> tuple[int, str, int]:
    """A sort key: a device's place in tables."""
    return device.host or 0, device.kind, device.index


def _distinct(devices: Sequence[Device]) -> tuple[Device, ...]:
    return tuple({str(device): device for device in devices}.values())


def _divide_devices(names: Sequence[str], texts: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The devices of single modules, and those that the others share."""
    own: dict[str, list[str]] = {}
    shared = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, equals, devices = part.partition("=")
        if not equals:
            shared.append(part)
            continue
        for module in need_modules(name.strip(), names, "-d"):
            if module in own:
                raise MisuseError(
                    f"-d names devices for {module} twice, the second time {devices}: write {module}={own[module][0]}"
                    f"&{devices} for all of them"
                )
            own[module] = [devices]
            twice = [device for device, count in Counter(map(str, parse_devices([devices]))).items() if count > 1]
            if twice:
                raise MisuseError(f"-d {part} names {twice[0]} twice for {module}: leave out one")
    return own, shared


def _divide_adapters(
    names: Sequence[str], asked: Sequence[tuple[str, float]]
) -> dict[str, tuple[tuple[str, float], ...]]:
    """The adapters of each module, as in `unet=FILE`. Raises MisuseError for an adapter without a module."""
    own: dict[str, tuple[tuple[str, float], ...]] = {}
    for text, strength in asked:
        name, equals, _ = text.partition("=")
        if not equals and len(names) > 1:
            raise MisuseError(
                f"--lora {text}: there are several models, {first_few(list(names))}: name the one that it is for, as "
                f"in --lora {names[0]}={text}"
            )
        for module in need_modules(name.strip(), names, "--lora") if equals else names:
            own[module] = (*own.get(module, ()), (text, strength))
    return own


def _divide_modes(names: Sequence[str], text: str) -> tuple[str, dict[str, str]]:
    """The split mode of all modules, and those of single ones."""
    mode, own = Request().split_mode, dict[str, str]()
    for part in (part.strip() for part in text.split(",")):
        name, equals, asked = part.partition("=")
        if not equals:
            mode = part
            continue
        for module in need_modules(name.strip(), names, "--split-mode"):
            if module in own:
                raise MisuseError(f"--split-mode names two modes for {module}, {own[module]} and {asked.strip()}")
            own[module] = asked.strip()
    return mode, own


def divide_by_input(modules: Sequence[FolderModule], given: Mapping[str, T], flag: str) -> dict[str, dict[str, T]]:
    """Divide what is given for inputs among the modules that have them. `MODULE.INPUT` overrides `INPUT`.

    Raises MisuseError if no module has an input.
    """
    plain: dict[str, dict[str, T]] = {module.name: {} for module in modules}
    prefixed: dict[str, dict[str, T]] = {module.name: {} for module in modules}
    for key, value in given.items():
        owners = _find_owners(modules, key)
        everyone = [module for module in modules if key in module.facts.inputs]
        if not owners and not everyone:
            raise MisuseError(f"{flag} names '{key}', {_missing(modules, key)}")
        for module, name in owners:
            prefixed[module.name][name] = value
        for module in everyone if not owners else ():
            plain[module.name][key] = value
    return {name: {**plain[name], **prefixed[name]} for name in plain}


def _find_owners(modules: Sequence[FolderModule], key: str) -> list[tuple[FolderModule, str]]:
    """The modules that the prefix of an input's name means, each with the input."""
    names = [module.name for module in modules]
    prefixes = [prefix for prefix in (*names, *ALIASES) if key.startswith(f"{prefix}.")]
    return [
        (module, rest)
        for prefix in prefixes
        for module in modules
        if module.name in find_modules(prefix, names) and (rest := key[len(prefix) + 1 :]) in module.facts.inputs
    ]


def _missing(modules: Sequence[FolderModule], key: str) -> str:
    prefix = key.partition(".")[0]
    if meant := find_modules(prefix, [module.name for module in modules]):
        inputs = [name for module in modules if module.name in meant for name in module.facts.inputs]
        return f"and {' and '.join(meant)} has no such input: there are {', '.join(dict.fromkeys(inputs))}"
    names = ", ".join(module.name for module in modules)
    return f"and no module has such an input: write MODULE.INPUT or INPUT; the modules are {names}"
