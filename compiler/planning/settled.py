"""Checks for options that contradict the plan's file that they are given with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from splitc.compiler.planning.plan_file import PlanFile
from splitc.compiler.request.request import Request
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.units import format_shape, parse_bytes


def check_settled(
    path: Path, file: PlanFile, request: Request, devices: Sequence[str], is_given: Callable[[str], bool]
) -> None:
    """Raise MisuseError for a given option that contradicts the plan's file.

    The message names both.
    """
    answers = list(request.planned(is_given, file))
    if devices:
        answers.append(("-d", [str(device) for device in parse_devices(devices)], [rank.device for rank in file.ranks]))
    for flag, asked, planned in answers:
        if planned is None:
            raise MisuseError(f"{flag} has no effect with {path}, which is planned already: plan again with it")
        if not (_SAME[flag](asked, planned) if flag in _SAME else asked == planned):
            if isinstance(asked, Mapping):
                planned = {name: planned.get(name, "nothing") for name in asked}
            raise MisuseError(
                f"{flag} says {_shown(asked)}, and {path} says {_shown(planned)}: leave the option out, or edit the "
                "plan, or plan again"
            )


def need_nothing_given(
    path: Path, request: Request, is_given: Callable[[str], bool], others: Sequence[str] = ()
) -> None:
    """Raise MisuseError for an option that was given, or is among the `others`, and that a folder's plan settles."""
    for flag in [*others, *(option.flag for option in request.settled(is_given).values())]:
        raise MisuseError(f"{flag} has no effect with {path}, which is planned already: edit the plan, or plan again")


def _same_shares(asked: Sequence[float], planned: Sequence[float]) -> bool:
    """Whether shares are the same, on any scales."""
    return len(asked) == len(planned) and np.allclose(np.divide(asked, sum(asked)), np.divide(planned, sum(planned)))


def _same_shapes(asked: Mapping[str, Sequence[int]], planned: Mapping[str, Sequence[int]]) -> bool:
    return all(list(shape) == planned.get(name) for name, shape in asked.items())


def _same_settings(asked: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
    """Whether inputs are bound to the same values. A single number fills the whole input."""
    return all(name in planned and bool(np.all(np.asarray(planned[name]) == value)) for name, value in asked.items())


def _same_budgets(asked: Sequence[str], planned: Mapping[str, int | None]) -> bool:
    budgets = dict(planned)
    for text in asked:
        name, _, amount = text.rpartition("=")
        budgets.update({device: parse_bytes(amount) for device in ([name] if name else planned)})
    return budgets == planned


_SAME: Mapping[str, Callable[[Any, Any], bool]] = {
    "--tensor-split": _same_shares,
    "--memory": _same_budgets,
    "--set": _same_settings,
    "--state": lambda asked, planned: asked.items() <= planned.items(),
    **dict.fromkeys(("--shapes", "--min-shapes", "--opt-shapes", "--max-shapes"), _same_shapes),
}


def _shown(value: Any) -> str:
    """A value in the syntax of the command line."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name}:{format_shape(entry)}" if isinstance(entry, list | tuple) else f"{name}={entry}"
            for name, entry in value.items()
        )
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
