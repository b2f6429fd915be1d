"""An unsplit model in MLServer, for comparison, written as a user would."""

from __future__ import annotations

import asyncio
from typing import Any

import onnxruntime as ort
from mlserver import MLModel, types
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError


class UnsplitModel(MLModel):  # type: ignore[misc]  # MLServer is not there when types are checked
    """A whole model in one session of ONNX Runtime."""

    async def load(self) -> bool:
        """Load the model."""
        self._session = ort.InferenceSession(self.settings.parameters.uri, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        """Answer a request."""
        feeds: dict[str, Any] = {each.name: NumpyCodec.decode_input(each) for each in payload.inputs}
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(None, self._session.run, None, feeds)
        except Exception as error:
            raise InferenceError(str(error)) from error
        names = [each.name for each in self._session.get_outputs()]
        encoded = [NumpyCodec.encode_output(name, array) for name, array in zip(names, outputs)]
        return types.InferenceResponse(model_name=self.name, outputs=encoded)
