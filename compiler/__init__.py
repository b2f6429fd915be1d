"""Cut or shard one ONNX model for several devices, and write the package that `splitc.runtime` runs."""

from splitc.compiler.package import compile_model
from splitc.compiler.plan import Plan, Request
from splitc.compiler.plan_model import plan_model

__all__ = ["Plan", "Request", "compile_model", "plan_model"]
