"""Concatenated weights: they refer to their parts, and read them when needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.cut_tensor import read_alone


class JoinedTensor(ir.LazyTensor):
    """Tensors of one type, concatenated along an axis. It takes no memory."""

    __slots__ = ("axis", "parts")

    def __init__(self, parts: Sequence[ir.TensorProtocol], axis: int, name: str) -> None:
        sizes = [part.shape.numpy() for part in parts]
        shape = [*sizes[0]]
        shape[axis] = sum(size[axis] for size in sizes)
        super().__init__(self._read, parts[0].dtype, ir.Shape(shape), name=name)
        self.parts, self.axis = tuple(parts), axis

    def _read(self) -> ir.TensorProtocol:
        arrays = [read_alone(part) for part in self.parts]
        return ir.Tensor(np.concatenate(arrays, self.axis), self.dtype, name=self.name)
