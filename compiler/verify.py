"""Compare a package that was just written with the unsplit model, on small made-up inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

import numpy as np
import psutil
from msgspec.structs import replace

from splitc.compiler.plan import Plan
from splitc.compiler.split.unlike import bind_unlike
from splitc.runtime.arrays import make_inputs
from splitc.runtime.compare import compare, load_unsplit
from splitc.runtime.errors import OutputsDifferError, SplitcError
from splitc.runtime.manifest import Tensor
from splitc.runtime.session import Session
from splitc.runtime.units import format_bytes

# The weights of the largest model that is compared: it is loaded twice.
LARGEST = 2 << 30
# The most elements that a made-up input may have.
MOST_ELEMENTS = 1 << 24


def verify_package(plan: Plan, package: Path) -> Optional[str]:
    """Run package and model on the same inputs. Returns why that was not possible, or None.

    Raises OutputsDifferError when an output differs beyond the tolerance of the model's number type.
    """
    graph = plan.analysis.graph
    weights = plan.analysis.costs.weight_bytes(graph.nodes)
    limit = min(LARGEST, psutil.virtual_memory().available // 3)
    if weights > limit:
        return f"its weights are {format_bytes(weights)}, and more than {format_bytes(limit)} is not loaded to compare"
    ranks = [f"cpu{number}" for number in range(len(plan.ranks))]
    with Session(package, verify=False, devices=ranks) as session:
        whole = load_unsplit(graph.path, session.threads * len(session.manifest.ranks))
        for inputs in _candidates(plan, session.inputs):
            feeds = make_inputs(inputs)
            try:
                expected = whole(feeds)
            except SplitcError:
                continue  # sizes that the model does not take together
            actual = session.run(feeds)
            differences = compare(expected, actual, number_type=session.manifest.number_type)
            if bad := [each for each in differences if not each.passed]:
                worst = max(bad, key=lambda each: each.relative)
                raise OutputsDifferError(
                    f"{len(bad)} of {len(differences)} outputs of the split model differ from the unsplit model's, "
                    f"'{worst.name}' most ({worst.problem or f'{worst.relative:.1e} of its largest value'}). Nothing "
                    "was written. This is a fault of splitc; please report it, and see what was split with "
                    "'splitc plan'. --no-verify writes the package as it is."
                )
            return None
    return "the model itself fails on made-up inputs; compare it on real ones with 'splitc check --inputs'"


def _candidates(plan: Plan, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The inputs with the shapes to try: unlike sizes, then those that were planned."""
    analysis = plan.analysis
    if plan.tensor is not None:
        unlike = plan.tensor.axis_map.bound
    else:
        unlike = bind_unlike(analysis.graph, analysis.shapes, analysis.costs.bound)
    for shapes in (unlike.shapes, analysis.shapes):
        if all(np.prod(shapes[tensor.name]) <= MOST_ELEMENTS for tensor in inputs):
            yield [replace(tensor, sample_shape=list(shapes[tensor.name])) for tensor in inputs]
