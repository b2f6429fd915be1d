from tests.helpers.fake_gpu_sessions import gpus

__all__ = ["gpus"]
