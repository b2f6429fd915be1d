"""The self check of engines with slots, with a random adapter, against the unsplit model with the same slots."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.frontend.graph import open_graph
from splitc.compiler.frontend.loading import read_model
from splitc.compiler.frontend.optional import make_overridable
from splitc.compiler.frontend.slots import graft_slots, need_slots, planned_rank
from splitc.runtime.adapters.loaded import LoadedAdapter
from splitc.runtime.package.manifest import Slot, slot_tensors

# The rank of the random adapter. A choice: few numbers, padded with zeros to the slots' rank as most adapters are.
RANK = 4
# The size of its updates, relative to a layer's results. A choice: outputs change well above the tolerance, and no
# softmax saturates.
SIZE = 0.25


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
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapted.onnx"
        ir.save(graph.model, file, external_data="adapted.data")
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
