"""ONNX's own multi-device annotations (IR version 11), for tools that show which values are sharded."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.origins import origin_of
from splitc.compiler.sharding.sharded_model import ShardedModel

# The first IR version with them. Models of an older version are not upgraded, since not all engines read this one.
IR_VERSION = 11


def annotate(graph: ir.Graph, split: ShardedModel, rank: int, stage: int) -> None:
    """Annotate each node of the graph, in place, with the sharded axes of the values that it reads and makes."""
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
