"""A program that was written for ONNX Runtime. Only the first import is another."""

import argparse

import numpy as np

from splitc.runtime import InferenceSession  # was: from onnxruntime import InferenceSession

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("package")
options = parser.parse_args()

session = InferenceSession(options.package, providers=["CPUExecutionProvider"])
feeds = {}
for argument in session.get_inputs():
    sizes = {"batch": 1, "sequence": 3, "past": 0, "past + sequence": 3}
    shape = [sizes.get(size, size) for size in argument.shape]
    feeds[argument.name] = np.ones(shape, np.int64 if argument.type == "tensor(int64)" else np.float32)
names = [argument.name for argument in session.get_outputs()]
for name, array in zip(names, session.run(names, feeds), strict=True):
    print(name, array.dtype, array.shape)
session.session.close()
