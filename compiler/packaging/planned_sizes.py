"""Checks that the model runs on the planned sizes, before a package is written for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.errors import ModelError
from splitc.compiler.frontend.fitted_sizes import WHOLE
from splitc.compiler.frontend.sizes_tried import Trial
from splitc.runtime.package.manifest import Fill
from splitc.runtime.units import format_shape


def check_sizes_tried(analysis: Analysis, fills: Mapping[str, Fill], say: Callable[[str], None]) -> None:
    """Report how the planned sizes were tried. Raises ModelError if the model does not run, even with `fills`."""
    fitted = analysis.fitted
    problem = fitted.problem
    if problem is not None and fills and fitted.tried == WHOLE:
        problem = Trial(analysis.graph).refusal(analysis.shapes, {**fitted.fills, **fills})
    if problem is None:
        say(f"the model runs with the planned sizes: {fitted.tried}")
        return
    by_user = [name for name in analysis.shapes if name in fitted.inputs.given]
    sizes = ", ".join(f"{name} {format_shape(shape)}" for name, shape in analysis.shapes.items() if name not in by_user)
    made_up = f" (made up: {sizes})" if sizes else ""
    raise ModelError(
        f"the model does not run with the planned sizes{made_up}: {problem}\nNothing was written. Give the sizes "
        "that it takes with --shapes, or the numbers with --fill; --no-verify writes the package as it is."
    )
