"""Load ONNX files in ONNX Runtime without its optimizations, and without reading their weights."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from splitc.runtime.engines.onnx_session import open_in_memory, open_onnx
from splitc.runtime.engines.operator_library import library_path


def load_unoptimized(
    model: Path | bytes, uses_operators: bool = False, trusts_data: bool = False
) -> ort.InferenceSession:
    """Load an ONNX file, or its content, in ONNX Runtime without optimizations.

    External weights are mapped into memory, not read.

    A model that `uses_operators` of splitc's library can't be run. Raises one of ERRORS: NotImplemented if the CPU
    provider has no kernel for an operator.
    """
    options = ort.SessionOptions()
    if uses_operators:
        options.register_custom_ops_library(str(library_path()))
    options.log_severity_level, options.intra_op_num_threads = 4, 1  # or a thread for each core would be started
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # one allocation of all weights' size, which Linux refuses above the memory's
    options.enable_mem_reuse = False  # planning the reuse takes 20 seconds for 8,000 nodes
    options.add_session_config_entry("session.disable_prepacking", "1")
    if isinstance(model, bytes):
        return open_in_memory(model, options)
    return open_onnx(model, options, ["CPUExecutionProvider"], trusts_data)
