"""What a user can get wrong, each kind with the exit code that the command line ends with."""

from __future__ import annotations


class SplitcError(Exception):
    """A failure that one message explains; the command line prints it without a traceback and exits with 1."""

    exit_code = 1


class MisuseError(SplitcError):
    """The request itself is wrong: an unknown device, a shape for an input that is not there."""

    exit_code = 2


class DoesNotFitError(SplitcError):
    """The model does not fit the devices' memory."""

    exit_code = 3


class OutputsDifferError(SplitcError):
    """A package computed something else than the unsplit model."""

    exit_code = 4


class PackageError(SplitcError):
    """A package is damaged, incomplete, or of a schema that this version can't read."""


class EngineError(SplitcError):
    """An engine failed on a request: its sizes do not fit together, or it ran out of memory."""


class FeedError(MisuseError):
    """Inputs that a model does not take: a name missing or unknown, another number type, another shape."""
