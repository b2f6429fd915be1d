from tests.runtime.fake_gpus import gpus

__all__ = ["gpus"]
