"""ONNX's own multi-device annotations (IR version 11), for tools that show which values are sharded."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.origins import origin_of
from splitc.compiler.sharding.sharded_model import ShardedModel

# The first IR version that has them. A model of an older one is not raised to it: not all engines read it.
IR_VERSION = 11


def annotate(graph: ir.Graph, split: ShardedModel, rank: int, stage: int) -> None:
    """Say for each node, in place, along which axes the values that it reads and makes are sharded over the ranks."""
    configuration = ir.ModelConfiguration(name="splitc", num_devices=split.ranks)
    shards = split.shards(rank)
    for node in graph:
        for value in dict.fromkeys(v for v in (*node.inputs, *node.outputs) if v is not None):
            origin = origin_of(value)
            axes = (split.axes(origin) if origin is not None else None) or ()
            for number in (number for number, axis in enumerate(axes) if shards.is_split(axis)):
                node.shard(
                    value,
                    configuration=configuration,
                    axis=number,
                    num_shards=split.ranks,
                    device_indices=range(split.ranks),
                    pipeline_stage=stage,
                )
