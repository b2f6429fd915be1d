"""Compare a package that was just written with the unsplit model, on small made-up inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
import psutil

from splitc.compiler.fills import find_fill
from splitc.compiler.plan import Plan
from splitc.compiler.shapes import Shape
from splitc.compiler.split.unlike import bind_unlike
from splitc.runtime.arrays import fill_array
from splitc.runtime.compare import compare
from splitc.runtime.engines.onnxruntime import OnnxRuntimeBackend
from splitc.runtime.errors import OutputsDifferError, SplitcError
from splitc.runtime.session import Session
from splitc.runtime.units import format_bytes

# The weights of the largest model that is compared: it is loaded twice.
LARGEST = 2 << 30
# The most elements that a made-up input may have.
MOST_ELEMENTS = 1 << 24

Arrays = dict[str, npt.NDArray[Any]]


def verify_package(plan: Plan, package: Path) -> Optional[str]:
    """Run package and model on the same inputs. Returns why that was not possible, or None.

    Raises OutputsDifferError when an output differs beyond the tolerance of the model's number type.
    """
    graph = plan.analysis.graph
    weights = plan.analysis.costs.weight_bytes(graph.nodes)
    limit = min(LARGEST, psutil.virtual_memory().available // 3)
    if weights > limit:
        return f"its weights are {format_bytes(weights)}, and more than {format_bytes(limit)} is not loaded to compare"
    with Session(package, verify=False) as session:
        whole = OnnxRuntimeBackend(session.threads * len(session.manifest.ranks)).load(graph.path)
        backend = OnnxRuntimeBackend(1)
        for shapes in _candidates(plan):
            feeds = _made_up(plan, shapes)
            try:
                found = whole.run({name: backend.upload(feeds[name]) for name in whole.inputs})
            except SplitcError:
                continue  # sizes that the model does not take together
            expected = {name: backend.download(value) for name, value in found.items()}
            actual = session.run(feeds)
            differences = compare(expected, actual, number_type=session.manifest.number_type)
            if bad := [each for each in differences if not each.passed]:
                worst = max(bad, key=lambda each: each.relative)
                raise OutputsDifferError(
                    f"{len(bad)} of {len(differences)} outputs of the split model differ from the unsplit model's, "
                    f"'{worst.name}' most ({worst.problem or f'{worst.relative:.1e} of its largest value'}). Nothing "
                    "was written. This is a fault of splitc; please report it, and see what was split with "
                    "'splitc plan --explain'. --no-verify writes the package as it is."
                )
            return None
    return "the model itself fails on made-up inputs; compare it on real ones with 'splitc check --inputs'"


def _candidates(plan: Plan) -> Iterator[dict[str, Shape]]:
    """Shapes to try: with unlike sizes, then as planned."""
    analysis = plan.analysis
    unlike = bind_unlike(analysis.graph, analysis.shapes, analysis.costs.bound)
    names = [value.name or "" for value in analysis.graph.graph.inputs]
    for shapes in (unlike.shapes, analysis.shapes):
        if all(np.prod(shapes[name]) <= MOST_ELEMENTS for name in names):
            yield {name: shapes[name] for name in names}


def _made_up(plan: Plan, shapes: dict[str, Shape]) -> Arrays:
    generator = np.random.default_rng(0)
    feeds = {}
    for value in plan.analysis.graph.graph.inputs:
        name = value.name or ""
        assert value.dtype is not None
        feeds[name] = fill_array(find_fill(value), str(value.dtype.numpy()), shapes[name], generator)
    return feeds
