"""An unsplit model in Triton's Python backend, for comparison, written as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort
import triton_python_backend_utils as triton


class TritonPythonModel:
    """A whole model in one session of ONNX Runtime, for one request after the other."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model that a file beside it names."""
        folder = Path(args["model_repository"]) / args["model_version"]
        path = (folder / "model.txt").read_text()
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._inputs = [each.name for each in self._session.get_inputs()]
        self._outputs = [each.name for each in self._session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests."""
        return [self._run(request) for request in requests]

    def _run(self, request: Any) -> Any:
        feeds = {name: triton.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
        try:
            outputs = self._session.run(self._outputs, feeds)
        except Exception as error:
            return triton.InferenceResponse(error=triton.TritonError(str(error)))
        return triton.InferenceResponse([triton.Tensor(*each) for each in zip(self._outputs, outputs)])
