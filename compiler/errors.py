"""Errors of models, and of ways to split them."""

from __future__ import annotations

from splitc.runtime.errors import SplitcError


class ModelError(SplitcError):
    """The model file is missing or damaged, or splitc or the engine does not support it."""

    page = "errors#models-that-are-refused"


class CannotSplitError(ModelError):
    """The chosen split mode can't split the model; another mode may."""

    page = "split-modes"
