"""Finds a model's operators that TensorRT does not support, before anything is built."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage, divide_blocks
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.packaging.build_graphs import prepare_graph
from splitc.compiler.packaging.build_messages import Job, Refusal
from splitc.compiler.packaging.building import find_builder
from splitc.compiler.packaging.onnx_files import write_model_files
from splitc.compiler.packaging.writer import PackageWriter
from splitc.compiler.planning.plan import Plan
from splitc.runtime.engines.kinds import PACKAGES, find_kind
from splitc.runtime.units import block_range, plural


def with_refusals(plan: Plan) -> Plan:
    """The plan with warnings for operators that its engine's builder does not support: see `describe_refusals`."""
    if not find_kind(plan.engine).is_built:
        return plan
    return replace(plan, warnings=(*plan.warnings, *describe_refusals(plan)))


def describe_refusals(plan: Plan) -> list[str]:
    """Warnings for operators that the parser of the plan's engine does not support, with their blocks and the reason.

    Blocks with the same operators and attributes give the same result, so only one of them is parsed. If TensorRT is
    not installed, one warning says so.
    """
    if not find_kind(plan.engine).is_installed:
        return [
            f"which operators {plan.engine} takes was not checked: it is not installed here "
            f"(pip install {PACKAGES[plan.engine]})"
        ]
    partition = plan.analysis.partition
    stages = divide_blocks(plan.analysis.graph, partition, range(1, len(partition.blocks) + 1))
    alike: dict[str, list[Stage]] = {}
    for stage in stages:
        alike.setdefault(_content(stage), []).append(stage)
    with tempfile.TemporaryDirectory(prefix="splitc-operators-") as folder:
        jobs = [_write(plan, stages[0], Path(folder) / f"block{n}") for n, stages in enumerate(alike.values())]
        groups = {job.where: stages for job, stages in zip(jobs, alike.values(), strict=True)}
        refusals = [
            (groups[job.where], refusal) for job, refusal in find_builder(plan.engine).find_refused(plan.engine, jobs)
        ]
    return _describe(plan, refusals)


def _content(stage: Stage) -> str:
    """A key of everything that TensorRT's parser reads of a stage: operators, attributes and types."""
    lines = []
    for node in stage.nodes:
        attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
        lines.append(repr((node.domain, node.op_type, attributes, [value.dtype for value in node.outputs])))
    return "\n".join(lines)


def _write(plan: Plan, stage: Stage, folder: Path) -> Job:
    graph = stage_graph(plan.analysis.graph, stage)
    for value in graph.inputs:  # the parser needs the number of dimensions
        bound = plan.analysis.costs.shapes.get(value.name or "")
        if value.shape is None and bound is not None and value.name not in plan.analysis.costs.bound.uncertain:
            value.shape = ir.Shape([None] * len(bound))
    name = stage.blocks[0].name
    prepare_graph(graph, {}, {value.name or "": name for node in graph for value in node.outputs})
    path = folder / "block.onnx"
    write_model_files({path: graph}, plan.analysis.graph.model, PackageWriter(folder))
    return Job(str(path), None, {}, name)


def _describe(plan: Plan, refusals: Sequence[tuple[Sequence[Stage], Refusal]]) -> list[str]:
    """Warnings, one for each operator and reason."""
    alike: dict[tuple[str, str], list[tuple[Sequence[Stage], Refusal]]] = {}
    for stages, refusal in refusals:
        alike.setdefault((refusal.operator, refusal.reason.splitlines()[0]), []).append((stages, refusal))
    warnings = []
    for (operator, reason), places in alike.items():
        blocks = [stage.blocks[0].name for stages, _ in places for stage in stages]  # one for each node
        where = f"{plural(len(blocks), 'node')} in {block_range(list(dict.fromkeys(blocks)))}"
        warnings.append(f"{plan.engine} does not take {operator} ({where}, first '{places[0][1].node}'): {reason}")
    return warnings
