"""Checks a package that was just written: loads it, and compares it with the unsplit model on made-up inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.errors import ModelError
from splitc.compiler.packaging.block_check import compare_blocks
from splitc.compiler.packaging.unsplit_file import adapted_file, random_adapter, unsplit_file
from splitc.compiler.planning.plan import Plan
from splitc.compiler.sharding.axis_map import probes_of, small_sizes
from splitc.compiler.sizes.fitting import WHOLE
from splitc.compiler.sizes.tried import MOST_ELEMENTS, Trial
from splitc.runtime.collectives.meeting import Meeting
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.engines.onnx_session import load_unoptimized
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, open_session
from splitc.runtime.errors import EngineError, FeedError, OutputsDifferError, PackageError, SplitcError
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.hardware.devices import free_bytes, host_memory, host_numbers
from splitc.runtime.package.manifest import Fill, Manifest, Tensor
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.verification import NEVER
from splitc.runtime.requests.added_feeds import needs_one_row
from splitc.runtime.session.session import Session
from splitc.runtime.tools.compare import Difference, compare
from splitc.runtime.tools.judge import Judged, judge, undefined_outputs
from splitc.runtime.tools.rounding import Arrays
from splitc.runtime.tools.unsplit import Reference, open_reference
from splitc.runtime.units import first_few, format_shape

# The most bytes of weights of a model that is compared whole, since it is loaded twice. A choice: larger ones
# are compared a block of each form at a time.
LARGEST = 2 << 30
# A block of this share of the free memory is compared, though it be larger: its weights are mapped, and copied one at a
# time. A choice: measured peaks are up to twice a block's bytes, but its values are not counted.
BLOCK_SHARE = 6
FAULT = "This is a fault of splitc; please report it, and see what was split with 'splitc plan'"
# The most sizes to try that the rewritten graph refuses. A choice: most models refuse them too.
MOST_REFUSED = 8
# The name of the adapter with which packages with slots are compared.
ADAPTER = "a random adapter"


@dataclass(frozen=True)
class Verdict:
    """Whether a package was compared with the unsplit model, and the result, or why not."""

    compared: bool
    text: str


class _NoKernelError(Exception):
    """A package for GPUs has a node without a CPU kernel, and is checked on CPU devices."""


def check_loads(package: Path, manifest: Manifest) -> None:
    """Raise ModelError unless ONNX Runtime loads each of the package's ONNX files.

    Weights are mapped, not read. Files are loaded with the CPU provider, so a missing kernel is only an error for
    packages that run on CPUs.
    """
    on_cpu = all(rank.device.startswith("cpu") for rank in manifest.ranks)
    files = [(engine, engine.source or engine.path) for engine in manifest.engines]
    files += [(engine, engine.adapted) for engine in manifest.engines if engine.adapted is not None]
    for engine, name in files:
        path = package / name
        uses_operators = bool(engine.group) and find_kind(manifest.engine).uses_operators
        if engine.group and not uses_operators:
            continue  # it has collectives inside, which only TensorRT supports
        try:
            load_unoptimized(path, uses_operators)
        except ort_errors.NotImplemented:
            if on_cpu:
                _load_whole(path, name, manifest, uses_operators)
        except ERRORS:
            _load_whole(path, name, manifest, uses_operators)


def _load_whole(path: Path, name: str, manifest: Manifest, uses_operators: bool) -> None:
    """Load an ONNX file with optimizations, which may replace an operator without a kernel by one with a kernel."""
    try:
        open_session(path, 1, Meeting(1).join(0) if uses_operators else None)
    except PackageError as error:
        reason = str(error.__cause__ or error)
        raise ModelError(
            f"ONNX Runtime can't load {name}, which was made of {manifest.source.name}: {reason}\nNothing was written. "
            f"If it can't load {manifest.source.name} either, the model is not valid for this version of ONNX Runtime."
        ) from error


def check_outputs(plan: Plan, package: Path) -> Verdict:
    """Run package and model on the same inputs, and compare their outputs.

    They run on the plan's GPUs if this machine has these and they have memory for both, else on CPU devices. Raises
    ModelError, as `check_loads` does, if the package can't be loaded. Raises OutputsDifferError if an output differs by
    more than the tolerance of the model's number type, and by much more than rounding changes it in the unsplit model.
    """
    graph = plan.analysis.graph
    weights = plan.analysis.costs.weight_bytes(graph.nodes)
    limit = min(LARGEST, host_memory()[1] // 3)  # the model, the package, and as much for what they compute
    if weights > limit:
        check_loads(package, read_manifest(package))
        if not plan.written.split.rewrites:
            tried = "its engines were loaded" if plan.replicas is None else "nodes were tried alone, on shards of rows"
            return Verdict(True, f"the model is too large to be compared whole: {tried}")
        return _check_blocks(plan.written, package, max(limit, host_memory()[1] // BLOCK_SHARE))
    try:
        opened = _open_package(plan, package)
    except _NoKernelError as error:
        return Verdict(False, f"{error}; compare it where its GPUs are: splitc check")
    with (
        opened as session,
        unsplit_file(plan.analysis) as (path, trusts_data),
    ):
        with _open_model(plan, session, path, trusts_data) as whole:
            said = _compare(plan, session, whole)
        if said is not None and session.manifest.slots and not find_kind(plan.engine).is_built:
            # The package has both kinds of engines loaded then, beside the model.
            fits = weights <= host_memory()[1] // 4
            adapted = _compare_adapted(plan, session, path, trusts_data) if fits else "not compared for lack of memory"
            said += f"; with {ADAPTER}, {adapted}"
    if said is not None:
        return Verdict(True, said)
    return Verdict(
        False,
        "the model itself fails on made-up inputs; say what it takes with --fill, or compare it on real ones: "
        "splitc check --inputs",
    )


def _open_package(plan: Plan, package: Path) -> Session:
    """A session on the package. Its engines were just built here, so they may contain host code."""
    try:
        return Session(package, verify=NEVER, devices=_find_devices(plan), host_code=True)
    except PackageError as error:
        check_loads(package, read_manifest(package))  # which says more
        if isinstance(error.__cause__, ort_errors.NotImplemented):
            raise _NoKernelError(f"this machine's CPU devices can't run it: {error.__cause__}") from error
        raise


def _compare_adapted(plan: Plan, session: Session, path: Path, trusts_data: bool) -> str:
    """Compare the engines with slots with the model at `path`, with the same slots. See `_compare`."""
    session.adapters.put(ADAPTER, random_adapter(session.manifest.slots))
    with (
        adapted_file(plan.analysis, path, trusts_data) as adapted,
        _open_model(plan, session, adapted, trusts_data) as whole,
    ):
        return _compare(plan, session, whole, ADAPTER) or "the model itself fails"


def _open_model(plan: Plan, session: Session, path: Path, trusts_data: bool) -> AbstractContextManager[Reference]:
    threads = session.threads * len(session.manifest.ranks)
    needed = _whole_bytes(plan)
    return open_reference(path, session.manifest, session.devices, threads, needed=needed, trusts_data=trusts_data)


def _check_blocks(plan: Plan, package: Path, most: int) -> Verdict:
    """Compare one block of each form, since the model is too large. Raises OutputsDifferError if they differ."""
    checked = compare_blocks(plan, package, read_manifest(package), most)
    left_out = first_few([f"not {name}: {reason}" for name, reason in checked.skipped.items()])
    if not checked.differences:
        return Verdict(False, f"the model is too large to be compared whole, and no block could be: {left_out}")
    differences = [difference for block in checked.differences.values() for difference in block]
    _check_all(differences)
    worst = max((difference.relative for difference in differences), default=0.0)
    return Verdict(
        True,
        f"the model is too large to be compared whole: {len(checked.differences)} of its {checked.blocks} blocks, one "
        f"of each form, agree with the model's own (largest error {worst:.1e})" + (f"; {left_out}" if left_out else ""),
    )


def _find_devices(plan: Plan) -> list[str]:
    """The plan's devices if they are GPUs of this machine with memory for package and model, else CPU devices."""
    devices = [rank.device.local for rank in plan.ranks]
    one_host = len(host_numbers([rank.device for rank in plan.ranks])) <= 1
    if one_host and all(device.kind == "cuda" for device in devices):
        needed = [rank.memory.total for rank in plan.ranks]
        needed[0] += _whole_bytes(plan)
        if all(free is not None and free >= size for free, size in zip(free_bytes(devices), needed, strict=True)):
            return [str(device) for device in devices]
    return [f"cpu{number}" for number in range(len(devices))]


def _whole_bytes(plan: Plan) -> int:
    """An upper bound of the unsplit model's bytes on made-up inputs: all ranks' together."""
    return sum(rank.memory.total for rank in plan.ranks)


def _compare(plan: Plan, session: Session, whole: Reference, adapters: str | None = None) -> str | None:
    """Compare the package with the unsplit model on the first sizes that the model takes. Returns the result as text.

    None if the model takes no sizes. If outputs differ for sizes with which the model computes NaN inside, or if all
    of an output is NaN, others are tried: kernels may return anything for NaN. Raises OutputsDifferError if the package
    differs.
    """
    held, undecided = session.adapters.sum(adapters), None
    for inputs in _candidates(plan, session.inputs):
        given = make_inputs(inputs)
        feeds: Arrays = given if held is None else {**given, **held.arrays}
        try:
            if session.manifest.batch is None and needs_one_row(session.manifest.lengths, given):
                continue  # the package refuses it in words
            expected = whole.run(feeds)
        except SplitcError:
            continue  # the model does not take these sizes together, such as caches of two lengths
        try:
            made = session.run(given, adapters=adapters)
        except FeedError:
            continue  # the package refuses them in words
        except EngineError as error:
            sizes = ", ".join(f"{name} {format_shape(array.shape)}" for name, array in given.items())
            raise OutputsDifferError(
                f"the split model fails with {sizes}, and the unsplit model runs: {error}\n"
                f"Nothing was written. {FAULT}. --no-verify writes the package as it is."
            ) from error
        compared = partial(compare, number_type=session.manifest.number_type)
        judged = judge(compared, whole, feeds, expected, made, unset=session.manifest.unset)
        undefined = set(undefined_outputs(expected)).difference(session.manifest.unset)
        if (judged.passed and not undefined) or not (name := whole.undefined(feeds)):
            return _result(whole, judged)
        undecided = replace(judged, unsteady=f"'{name}' of the unsplit model is NaN for inputs of these sizes")
    return None if undecided is None else _result(whole, undecided)


def _result(whole: Reference, judged: Judged) -> str:
    _check_all(judged.differences, judged.unsteady)
    worst = max((difference.relative for difference in judged.differences), default=0.0)
    count = len(judged.differences)
    agree = "1 output agrees" if count == 1 else f"{count} outputs agree"
    said = f"{agree} with {whole} (largest error {worst:.1e})" if count else "no output was compared"
    return "; ".join([said, *judged.notes])


def _check_all(differences: Sequence[Difference], unsteady: str = "") -> None:
    if bad := [difference for difference in differences if not difference.passed]:
        worst = max(bad, key=lambda difference: difference.relative)
        raise OutputsDifferError(
            f"{len(bad)} of {len(differences)} outputs of the split model differ from the unsplit model's, "
            f"'{worst.name}' most ({worst.problem or f'{worst.relative:.1e} of its largest value'}). Nothing was "
            f"written. {f'The package may be right: {unsteady}, so no comparison can tell' if unsteady else FAULT}. "
            "--no-verify writes the package as it is."
        )


def _candidates(plan: Plan, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The inputs with each set of shapes to try: small sizes first, then probe sizes, then the planned shapes.

    Before them come small sizes that the rewritten graph refuses. If it does so by a fault, no others would show it.
    """
    analysis = plan.analysis
    refused = probes_of(analysis).refused()[:MOST_REFUSED]
    small = [bound.shapes for bound in (*refused, *small_sizes(analysis))]
    for shapes in (*small, plan.split.probe_shapes.shapes, analysis.shapes):
        if all(np.prod(shapes[tensor.name]) <= MOST_ELEMENTS for tensor in inputs):
            yield [msgspec.structs.replace(tensor, sample_shape=list(shapes[tensor.name])) for tensor in inputs]


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
