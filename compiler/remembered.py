"""Remember what a function returned about an object for as long as the object lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

F = TypeVar("F", bound=Callable[..., Any])


def remembered(function: F) -> F:
    """The function, which runs once for each first argument, told apart by identity, and each of the others."""
    results: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    @wraps(function)
    def call(about: Any, *others: Any) -> Any:
        known = results.setdefault(about, {})
        if others not in known:
            known[others] = function(about, *others)
        return known[others]

    return call  # type: ignore[return-value]
