"""What is wrong with a model, or with how it is to be split."""

from __future__ import annotations

from splitc.runtime.errors import SplitcError


class ModelError(SplitcError):
    """The model file is missing, damaged, or holds what splitc or the engine can't take."""


class CannotSplitError(ModelError):
    """The split mode that was asked for can't split the model; another one may."""
