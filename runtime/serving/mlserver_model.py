"""The model that MLServer loads. Its `model-settings.json` names the class.

MLServer executes this module again for each model that it loads, so objects that models share are in other modules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlserver import MLModel, types
from mlserver.codecs import NumpyCodec
from mlserver.errors import MLServerError
from mlserver.utils import get_model_uri

from splitc.runtime.arrays.array import Array
from splitc.runtime.files.explained import explained
from splitc.runtime.serving.interface import TYPES
from splitc.runtime.serving.kept_sequences import SequenceStep
from splitc.runtime.serving.metrics_page import Family, MetricsPage, Put, find_metric
from splitc.runtime.serving.served_package import ServedPackage, ServedRequest, is_clients_fault
from splitc.runtime.threads.futures import Executor


class SplitcModel(MLModel):  # type: ignore[misc]  # MLServer is not there when types are checked
    """A package, behind the interface of MLServer."""

    async def load(self) -> bool:
        """Load the package."""
        file = Path(await get_model_uri(self._settings))
        loop = asyncio.get_running_loop()
        try:
            self._served = await loop.run_in_executor(None, self._open, file)
        except Exception as error:
            if (known := explained(error)) is None:
                raise
            raise MLServerError(str(known), 500) from None
        # One thread submits requests: it waits while too many are in flight, so that the server need not.
        self._submits = Executor(1, "splitc takes requests")
        self._page = MetricsPage(self._metric)
        return True

    def _open(self, file: Path) -> ServedPackage:
        return ServedPackage(file)

    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        """Answer a request."""
        request = ServedRequest(
            {tensor.name: _read(tensor) for tensor in payload.inputs},
            _find_step(payload.parameters),
            str(getattr(payload.parameters, "adapter", "")),
        )
        loop = asyncio.get_running_loop()
        try:
            (answer,) = await loop.run_in_executor(self._submits, self._served.submit, [request])
            self._show_metrics()
            outputs = await asyncio.wrap_future(answer)
        except Exception as error:
            status = 400 if is_clients_fault(error) else 500
            raise MLServerError(str(explained(error) or repr(error)), status) from error
        finally:
            self._show_metrics()
        wanted = {output.name for output in payload.outputs or ()} or outputs.keys()
        return types.InferenceResponse(
            id=payload.id,
            model_name=self.name,
            model_version=self.version,
            outputs=[_write(name, array) for name, array in outputs.items() if name in wanted],
        )

    def _show_metrics(self) -> None:
        self._page.show(self._served.metrics, self._served.devices)

    def _metric(self, family: Family, labels: Mapping[str, str]) -> Put:
        """A function that adds to the server's metric, or sets it."""
        metric = find_metric(family).labels(model=self.name, **labels)
        put: Put = metric.inc if family.counts else metric.set
        return put

    async def unload(self) -> bool:
        """End the session after the requests in flight. MLServer also unloads models that could not be loaded."""
        if not hasattr(self, "_served"):
            return True
        await asyncio.get_running_loop().run_in_executor(None, self._served.close)
        self._submits.shutdown(wait=False)
        return True


def _read(given: types.RequestInput) -> Array:
    """The array of an input. Raises MLServerError if its data do not fit its type and shape."""
    try:
        array: Array = NumpyCodec.decode_input(given)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"the data of the input '{given.name}' are no {given.datatype} array of shape {given.shape}: {error}"
        raise MLServerError(message, 400) from error
    return array


def _write(name: str, array: Array) -> types.ResponseOutput:
    shape = list(array.shape) or [1]
    return types.ResponseOutput(name=name, datatype=TYPES[array.dtype.name], shape=shape, data=array.ravel().tolist())


def _find_step(parameters: Any) -> SequenceStep | None:
    """The sequence that a request belongs to, by the names that Triton's clients give."""
    sequence_id = getattr(parameters, "sequence_id", None)
    if not sequence_id:
        return None
    start, end = (bool(getattr(parameters, f"sequence_{word}", False)) for word in ("start", "end"))
    return SequenceStep(sequence_id, start, end)
