"""Load a package of `splitc compile`, and run its engines as one model. Needs neither onnx nor onnx_ir."""

from splitc.runtime.errors import (
    DoesNotFitError,
    EngineError,
    FeedError,
    MisuseError,
    OutputsDifferError,
    PackageError,
    SplitcError,
)
from splitc.runtime.generate.sampling import Sampling
from splitc.runtime.sequence import StateSequence
from splitc.runtime.session import Session

__all__ = [
    "DoesNotFitError",
    "EngineError",
    "FeedError",
    "MisuseError",
    "OutputsDifferError",
    "PackageError",
    "Sampling",
    "Session",
    "SplitcError",
    "StateSequence",
]
