"""The files of the unsplit model that a package is compared with: as it is, and with slots for a random adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from splitc.compiler.adapters.slots import graft_slots, need_slots, planned_rank
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.graphs.optional import make_overridable
from splitc.compiler.normal_form.graph import open_graph
from splitc.compiler.normal_form.runnable import make_runnable, runnable_file
from splitc.compiler.reading.external_data import load_settled, saved
from splitc.compiler.reading.loading import read_model
from splitc.runtime.adapters.loaded import LoadedAdapter
from splitc.runtime.package.manifest import Slot, slot_tensors

# The rank of the random adapter. A choice: few numbers, padded with zeros to the slots' rank as most adapters are.
RANK = 4
# The size of its updates, relative to a layer's results. A choice: outputs change well above the tolerance, and no
# softmax saturates.
SIZE = 0.25


@contextmanager
def unsplit_file(analysis: Analysis) -> Iterator[tuple[Path, bool]]:
    """The model's file, and whether it may have data outside its folder.

    If adapters are merged, a file with them in its weights, inside the context. Likewise if CPUs have no kernels
    for nodes of the model.
    """
    graph = analysis.graph
    if not analysis.merged:
        with runnable_file(graph.model, graph.path) as (path, is_own):
            yield path, is_own and graph.trusts_data
        return
    model = load_settled(graph.path)
    constants = {node.outputs[0].name: node for node in model.graph if node.op_type == "Constant" and not node.domain}
    for name, tensor in (item for merged in analysis.merged for item in merged.weights.items()):
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = tensor
        else:
            constants[name].attributes["value"] = ir.AttrTensor("value", ir.Tensor(tensor.numpy(), tensor.dtype))
    make_runnable(model)
    with saved(model, "merged") as path:
        yield path, False


@contextmanager
def adapted_file(analysis: Analysis, path: Path, trusts_data: bool) -> Iterator[Path]:
    """The unsplit model at `path` with the package's slots, in a file that exists inside the context.

    The slots are grafted to the model as its file has it, so that the comparison covers fusion too.
    """
    settings = {fixed.input.name or "": fixed.value for fixed in analysis.graph.fixed if fixed.value is not None}
    graph = open_graph(path, *read_model(path, trusts_data), settings, trusts_data)
    if analysis.slot_rank is not None:
        graph, _ = graft_slots(graph, planned_rank(analysis.slot_rank))
    make_overridable(graph.graph)
    need_slots(graph.graph, [tensor.name for tensor in slot_tensors(analysis.slots)])
    with saved(graph.model, "adapted") as file:
        yield file


def random_adapter(slots: Sequence[Slot]) -> LoadedAdapter:
    """An adapter with an update for all slots."""
    generator = np.random.default_rng(0)
    arrays = {}
    for number, slot in enumerate(slots):
        inputs = slot.inputs * math.prod(slot.kernel)
        a = generator.standard_normal((RANK, inputs), np.float32) * inputs**-0.5
        b = generator.standard_normal((RANK, slot.outputs), np.float32) * (SIZE * RANK**-0.5 / slot.factor)
        arrays[number] = a, b
    return LoadedAdapter(1.0, arrays, {})
