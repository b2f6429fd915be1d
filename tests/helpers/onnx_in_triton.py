"""A stand-in for Triton's ONNX Runtime backend, which pip's server lacks: its Python backend runs the ONNX file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime as ort

MODEL = "from tests.helpers.onnx_in_triton import TritonPythonModel\n"
TYPES = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32", "tensor(bool)": "TYPE_BOOL"}


def replace_backend(folder: Path) -> None:
    """Turn a model of the ONNX Runtime backend into one of the Python backend, with the tensors of its ONNX file."""
    config = folder / "config.pbtxt"
    lines = config.read_text().splitlines()
    (named,) = (line for line in lines if line.startswith("default_model_filename: "))
    name = json.loads(named.partition(": ")[2])
    lines.remove(named)
    lines[lines.index('backend: "onnxruntime"')] = 'backend: "python"'
    session = ort.InferenceSession(str(folder / "1" / name), providers=["CPUExecutionProvider"])
    for kind, values in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for each in values:
            dims = ", ".join(str(size if isinstance(size, int) else -1) for size in each.shape)
            lines.append(f'{kind} {{ name: "{each.name}" data_type: {TYPES[each.type]} dims: [ {dims} ] }}')
    lines.append(f'parameters {{ key: "onnx" value {{ string_value: "{name}" }} }}')
    config.write_text("\n".join(lines) + "\n")
    (folder / "1" / "model.py").write_text(MODEL)


class TritonPythonModel:
    """A model that runs one ONNX file."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the file that the config names."""
        folder = Path(args["model_repository"]) / args["model_version"]
        name = json.loads(args["model_config"])["parameters"]["onnx"]["string_value"]
        self._session = ort.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests."""
        import triton_python_backend_utils as triton

        names = [each.name for each in self._session.get_outputs()]
        inputs = [each.name for each in self._session.get_inputs()]
        responses = []
        for request in requests:
            feeds = {name: triton.get_input_tensor_by_name(request, name).as_numpy() for name in inputs}
            outputs = self._session.run(names, feeds)
            responses.append(triton.InferenceResponse([triton.Tensor(*each) for each in zip(names, outputs)]))
        return responses
