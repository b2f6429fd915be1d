"""The weights that a request puts on other devices than the blocks, by name or because they are experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.placement.experts import find_experts
from splitc.compiler.placement.weights import WeightUse, placeable
from splitc.compiler.request.places import ExpertsPlace, Place
from splitc.compiler.request.request import Request
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device, parse_devices
from splitc.runtime.units import first_few, format_bytes

# How many names the error lists if none matches.
NAMED = 8


def asked_devices(devices: Sequence[Device], request: Request) -> list[int]:
    """The numbers of the devices for placed weights. Raises MisuseError for a device that is not among `devices`."""
    named = _named(devices, request)
    return [place for place, device in enumerate(devices) if str(device) in named]


def _named(devices: Sequence[Device], request: Request) -> list[str]:
    """The device of each `--place`, then the one of `--experts`."""
    named = [_device(f"--place {place}", place.device, devices) for place in request.place]
    if request.experts is not None:
        named.append(_device(f"--experts {request.experts}", request.experts.device, devices))
    return named


def asked_places(costs: Costs, devices: Sequence[Device], request: Request) -> dict[ir.Value, str]:
    """The device of each weight that the request places. `--place` takes precedence over `--experts`.

    Raises MisuseError for a device that is not among `devices`, a pattern that matches nothing, and a model without
    experts.
    """
    uses = placeable(costs)
    named = _named(devices, request)
    matches = [_matching(costs, uses, place) for place in request.place]
    if request.experts is not None:
        matches.append(_experts(costs, request.experts))
    placed: dict[ir.Value, str] = {}
    for weights, device in zip(matches, named, strict=True):
        placed.update({weight: device for weight in weights if weight not in placed})
    return {weight: placed[weight] for weight in uses if weight in placed}


def _device(flag: str, name: str, devices: Sequence[Device]) -> str:
    """The device of this name among the plan's devices."""
    named = parse_devices([name])
    if len(named) != 1 or named[0] not in devices:
        raise MisuseError(
            f"{flag} names the device '{name}', and the plan's devices are {first_few([str(own) for own in devices])}: "
            f"add it (-d {name}), or name one of these"
        )
    return str(named[0])


def _matching(costs: Costs, uses: Mapping[ir.Value, WeightUse], place: Place) -> list[ir.Value]:
    """The weights with a name that the pattern matches anywhere."""
    pattern = re.compile(place.pattern)
    matching = [weight for weight, use in uses.items() if any(map(pattern.search, use.names))]
    if matching:
        return matching
    largest = sorted(uses, key=lambda weight: -costs.value_bytes(weight))[:NAMED]
    listed = "\n".join(f"  {format_bytes(costs.value_bytes(w))}: {first_few(uses[w].names)}" for w in largest)
    raise MisuseError(
        f"--place {place}: no weight of more than 1 KiB has a name that '{place.pattern}' matches. Names of the "
        f"largest weights, and of the nodes and modules that read them:\n{listed}"
    )


def _experts(costs: Costs, asked: ExpertsPlace) -> list[ir.Value]:
    """The experts of the first layers that have some, as many layers as asked for."""
    layers = find_experts(costs)
    if not layers:
        raise MisuseError(
            f"--experts {asked}: this model has no experts that splitc recognizes (the operators MoE and QMoE, or "
            "products that the top-k of a router chooses from): name the weights, as in --place 'experts=cpu0'"
        )
    if asked.layers is not None and asked.layers > len(layers):
        raise MisuseError(f"--experts {asked}: only {len(layers)} layers of this model have experts")
    return [weight for weights in layers[: asked.layers] for weight in weights]
