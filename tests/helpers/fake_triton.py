"""A stand-in for `triton_python_backend_utils`, which exists only inside Triton."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from splitc.runtime.arrays.array import Array

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """Raised by a model that can't be loaded."""


class TritonError(Exception):
    """An error in a response."""

    INVALID_ARG, INTERNAL = 3, 1

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Tensor:
    """A named array, on the host or on a simulated GPU."""

    name: str
    array: Any

    @classmethod
    def from_dlpack(cls, name: str, array: Any) -> Tensor:
        """A tensor of an array on a GPU."""
        assert array.__dlpack_device__()[0] == 2
        return cls(name, array)

    def is_cpu(self) -> bool:
        """Whether the array is on the host."""
        return isinstance(self.array, np.ndarray)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(self, stream: int) -> Any:
        """The array as a capsule, once no stream writes to it."""
        return self.array

    def as_numpy(self) -> Array:
        """The array."""
        array: Array = self.array
        assert self.is_cpu()
        return array


@dataclass
class Metric:
    """A metric on the server's page."""

    labels: Mapping[str, str]
    value: float = 0.0

    def increment(self, more: float) -> None:
        """Add to it."""
        assert more >= 0
        self.value += more

    def set(self, value: float) -> None:
        """Set its value."""
        self.value = value


@dataclass
class MetricFamily:
    """The metrics of one name. `families` are the metrics of all models."""

    COUNTER: ClassVar[str] = "counter"
    GAUGE: ClassVar[str] = "gauge"
    families: ClassVar[list[MetricFamily]] = []

    name: str
    description: str
    kind: str
    metrics: list[Metric] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.families.append(self)

    def Metric(self, labels: Mapping[str, str]) -> Metric:
        """Add a metric of this family."""
        self.metrics.append(Metric(labels))
        return self.metrics[-1]


@dataclass(frozen=True)
class InferenceResponse:
    """A client's response: tensors, or an error."""

    output_tensors: Sequence[Tensor] = ()
    error: TritonError | None = None


@dataclass
class InferenceRequest:
    """A client's request, which also is its response sender."""

    feeds: Mapping[str, Any]
    wanted: Sequence[str]
    id: int = 0
    marks: int = 0
    adapter: str = ""
    responses: list[InferenceResponse] = field(default_factory=list)
    answered: threading.Event = field(default_factory=threading.Event)

    def correlation_id(self) -> int:
        """The id of its sequence."""
        return self.id

    def flags(self) -> int:
        """Whether it begins or ends a sequence."""
        return self.marks

    def parameters(self) -> str:
        """The client's own parameters."""
        return json.dumps({"adapter": self.adapter, "other": 1} if self.adapter else {})

    def requested_output_names(self) -> Sequence[str]:
        """The names of the requested outputs."""
        return self.wanted

    def get_response_sender(self) -> InferenceRequest:
        """The sender of its response."""
        return self

    def send(self, response: InferenceResponse, flags: int) -> None:
        """Receive the response, which must be the only one."""
        assert flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.responses.append(response)
        self.answered.set()

    def result(self) -> dict[str, Array]:
        """The outputs. Raises the response's error."""
        assert self.answered.wait(20)
        (response,) = self.responses
        if response.error is not None:
            raise response.error
        return {each.name: each.array for each in response.output_tensors}


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Any:
    """An input of the request; None if there is none of this name."""
    return Tensor(name, request.feeds[name]) if name in request.feeds else None
