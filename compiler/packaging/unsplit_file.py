"""The file of the unsplit model that a package is compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.frontend.external_data import settle_weights
from splitc.compiler.frontend.query_norms import runnable_file, take_out_norms


@contextmanager
def unsplit_file(analysis: Analysis) -> Iterator[tuple[Path, bool]]:
    """The model's file, and whether it may have data outside its folder.

    If adapters are merged, a file with them in its weights, inside the context. Likewise if CPUs have no kernel for
    norms of the model.
    """
    graph = analysis.graph
    if not analysis.merged:
        with runnable_file(graph.model, graph.path) as (path, is_own):
            yield path, is_own and graph.trusts_data
        return
    model = ir.load(graph.path)
    settle_weights(model, graph.path.parent)
    constants = {node.outputs[0].name: node for node in model.graph if node.op_type == "Constant" and not node.domain}
    for name, tensor in (item for merged in analysis.merged for item in merged.weights.items()):
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = tensor
        else:
            constants[name].attributes["value"] = ir.AttrTensor("value", ir.Tensor(tensor.numpy(), tensor.dtype))
    take_out_norms(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "merged.onnx"
        ir.save(model, path, external_data="merged.data")
        yield path, False
