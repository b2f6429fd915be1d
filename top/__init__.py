"""splitc: `splitc.compiler` splits ONNX models over several devices, and `splitc.runtime` runs the pieces as one."""

from splitc.runtime.version import VERSION as __version__

__all__ = ["__version__"]
