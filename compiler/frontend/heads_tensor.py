"""A weight's columns as one matrix for each head: it refers to the weight, and reads it when needed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.cut_tensor import read_alone


class HeadsTensor(ir.LazyTensor):
    """[heads, rows, columns], or with `turned` [heads, columns, rows], of `source` [rows, heads x width].

    Only `columns` of each head's width are taken. It takes no memory.
    """

    __slots__ = ("columns", "heads", "source", "turned")

    def __init__(self, source: ir.TensorProtocol, heads: int, columns: slice, turned: bool, name: str) -> None:
        rows, count = int(source.shape.numpy()[0]), columns.stop - columns.start
        shape = ir.Shape([heads, count, rows] if turned else [heads, rows, count])
        super().__init__(self._read, source.dtype, shape, name=name)
        self.source, self.heads, self.columns, self.turned = source, heads, columns, turned

    def _read(self) -> ir.TensorProtocol:
        array = read_alone(self.source)
        chosen = array.reshape(len(array), self.heads, -1)[:, :, self.columns]
        made = chosen.transpose((1, 2, 0) if self.turned else (1, 0, 2))
        return ir.Tensor(np.ascontiguousarray(made), self.dtype, name=self.name)
