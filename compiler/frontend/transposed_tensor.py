"""Weights with their axes in another order: they refer to the stored ones, and read them when needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.cut_tensor import read_alone


class TransposedTensor(ir.LazyTensor):
    """A tensor with its axes in this order. It takes no memory."""

    __slots__ = ("order", "source")

    def __init__(self, source: ir.TensorProtocol, order: Sequence[int], name: str) -> None:
        sizes = source.shape.numpy()
        super().__init__(self._read, source.dtype, ir.Shape([sizes[axis] for axis in order]), name=name)
        self.source, self.order = source, tuple(order)

    def _read(self) -> ir.TensorProtocol:
        array = np.ascontiguousarray(read_alone(self.source).transpose(self.order))
        return ir.Tensor(array, self.dtype, name=self.name)
