"""Remembers a function's results for an object as long as the object lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

F = TypeVar("F", bound=Callable[..., Any])


def remembered(function: F) -> F:
    """Wrap a function so that it runs once for each first argument, compared by identity, and other arguments."""
    results: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    @wraps(function)
    def call(about: Any, *others: Any) -> Any:
        known = results.setdefault(about, {})
        if others not in known:
            known[others] = function(about, *others)
        return known[others]

    return call  # type: ignore[return-value]
