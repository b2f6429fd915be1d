"""The model that Triton's Python backend loads: `model.py` in its repository imports it.

Triton hands over requests one after another. Each is answered later by its own response sender, so that many are in
flight without a streaming protocol for clients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # a module of the server, in whose process this runs

from splitc.runtime.files.explained import explained
from splitc.runtime.hardware.gpus import need_cupy
from splitc.runtime.serving.kept_sequences import Answer, SequenceStep
from splitc.runtime.serving.metrics_page import FAMILIES, Family, MetricsPage, Put
from splitc.runtime.serving.served_package import ServedPackage, ServedRequest, is_clients_fault
from splitc.runtime.serving.serving_file import FILE_NAME
from splitc.runtime.threads.futures import Executor


class TritonPythonModel:
    """A package with the interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the package. `args` locate the model in its repository."""
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            self._served = ServedPackage(folder / FILE_NAME, counts_sequences=True)
        except Exception as error:
            if (known := explained(error)) is None:
                raise
            raise triton.TritonModelException(str(known)) from None
        interface = self._served.interface
        self._inputs = [tensor.name for tensor in (*interface.inputs, *interface.optional)]
        self._outputs = [tensor.name for tensor in interface.outputs]
        self._senders = Executor(2, "splitc answers")
        self._families = {family: _family(family) for family in FAMILIES}
        self._page = MetricsPage(partial(self._metric, args["model_name"]))

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the requests. Their response senders answer them later."""
        answers = self._served.submit([self._read(request) for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            answer.add_done_callback(partial(self._answer_later, request))
        self._show_metrics()

    def _show_metrics(self) -> None:
        self._page.show(self._served.metrics, self._served.devices)

    def _metric(self, model: str, family: Family, labels: Mapping[str, str]) -> Put:
        """A function that adds to the server's metric, or sets it."""
        metric = self._families[family].Metric(labels={"model": model, **labels})
        put: Put = metric.increment if family.counts else metric.set
        return put

    def _read(self, request: Any) -> ServedRequest:
        """The request's arrays, as views of the server's memory on the host or a GPU."""
        tensors = {name: triton.get_input_tensor_by_name(request, name) for name in self._inputs}
        feeds = {name: _array(tensor) for name, tensor in tensors.items() if tensor is not None}
        adapter = str(json.loads(request.parameters() or "{}").get("adapter", ""))
        if not (sequence := request.correlation_id()):
            return ServedRequest(feeds, adapter=adapter)
        flags = request.flags()
        start = bool(flags & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        end = bool(flags & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        return ServedRequest(feeds, SequenceStep(sequence, start, end), adapter)

    def _answer_later(self, request: Any, answer: Answer) -> None:
        """Send the answer from another thread, so that no request waits for the copy to the server's memory."""
        self._senders.submit(self._answer, request, answer)

    def _answer(self, request: Any, answer: Answer) -> None:
        try:
            response = self._response(request, answer)
        except Exception as error:  # an error of the server's library: the client waits for an answer
            response = _failure(error)
        self._show_metrics()
        request.get_response_sender().send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, request: Any, answer: Answer) -> Any:
        if (error := answer.exception()) is not None:
            return _failure(error)
        outputs, wanted = answer.result(), request.requested_output_names()
        return triton.InferenceResponse([_tensor(name, outputs[name]) for name in self._outputs if name in wanted])

    def finalize(self) -> None:
        """Unload the package after the requests in flight are answered."""
        self._served.close()
        self._senders.shutdown()


def _family(family: Family) -> Any:
    """Triton's metric family of this name."""
    kind = triton.MetricFamily.COUNTER if family.counts else triton.MetricFamily.GAUGE
    return triton.MetricFamily(name=family.name, description=family.help, kind=kind)


def _array(tensor: Any) -> Any:
    """A server tensor as an array of numpy, or of CuPy if it is on a GPU."""
    return tensor.as_numpy() if tensor.is_cpu() else need_cupy().from_dlpack(tensor)


def _tensor(name: str, array: Any) -> Any:
    """An output as a server tensor, on the GPU if it is there. Server tensors are never scalars."""
    if array.dtype == bool and not isinstance(array, np.ndarray):
        array = array.get()  # not all versions of CuPy export booleans by DLPack
    if isinstance(array, np.ndarray):
        return triton.Tensor(name, np.ascontiguousarray(np.atleast_1d(array)))
    return triton.Tensor.from_dlpack(name, array.reshape(array.shape or (1,)))


def _failure(error: BaseException) -> Any:
    """The response to a request that failed."""
    kind = triton.TritonError.INVALID_ARG if is_clients_fault(error) else triton.TritonError.INTERNAL
    return triton.InferenceResponse(error=triton.TritonError(str(explained(error) or repr(error)), kind))
