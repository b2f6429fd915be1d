"""Split a model over two CPU devices, and compare the package with the whole model."""

import argparse

import numpy as np
import onnxruntime

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("package")
parser.add_argument("--devices", default="2xcpu", help="cuda0,cuda1 for two GPUs")
parser.add_argument("--mode", default="layer", help="layer, tensor, row, batch or auto")
options = parser.parse_args()

plan = plan_model(options.model, options.devices, Request(split_mode=options.mode))
print(plan)
compile_model(plan, options.package, force=True)

ids = np.array([[5, 17, 33, 2]])
feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(4)[None]}
with Session(options.package) as session:
    print(session)
    outputs = session.run(feeds)  # caches that are not fed begin empty

whole = onnxruntime.InferenceSession(options.model, providers=["CPUExecutionProvider"])
for argument in whole.get_inputs():  # ONNX Runtime wants them fed
    if argument.name not in feeds:
        heads, size = argument.shape[1], argument.shape[3]
        feeds[argument.name] = np.zeros((1, heads, 0, size), np.float32)
(expected,) = whole.run(["logits"], feeds)
print("largest difference:", np.abs(outputs["logits"] - expected).max())
