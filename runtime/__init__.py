"""Load a package of `splitc compile`, and run its engines as one model. Needs neither onnx nor onnx_ir."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# ONNX Runtime 1.31 sends telemetry on Linux too, and complains where it can't write to the user's home. It looks here
# when it is imported. Set it to 0 to permit that.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from splitc.runtime.arrays.torch_tensors import to_torch
    from splitc.runtime.errors import (
        AdapterError,
        DoesNotFitError,
        EngineError,
        FeedError,
        MisuseError,
        OutputsDifferError,
        PackageError,
        SplitcError,
    )
    from splitc.runtime.generate.encoder_decoder import EncoderDecoder
    from splitc.runtime.generate.sampling import Sampling
    from splitc.runtime.integrations.inference_session import InferenceSession
    from splitc.runtime.requests.sequence import StateSequence
    from splitc.runtime.session.pipeline import Pipeline
    from splitc.runtime.session.session import Session

__all__ = [
    "AdapterError",
    "DoesNotFitError",
    "EncoderDecoder",
    "EngineError",
    "FeedError",
    "InferenceSession",
    "MisuseError",
    "OutputsDifferError",
    "PackageError",
    "Pipeline",
    "Sampling",
    "Session",
    "SplitcError",
    "StateSequence",
    "to_torch",
]
# Names are imported when they are used: ranks' processes and the command line begin sooner.
_PLACES = {
    "EncoderDecoder": "generate.encoder_decoder",
    "InferenceSession": "integrations.inference_session",
    "Pipeline": "session.pipeline",
    "Sampling": "generate.sampling",
    "Session": "session.session",
    "StateSequence": "requests.sequence",
    "to_torch": "arrays.torch_tensors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_PLACES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
