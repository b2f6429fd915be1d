from tests.helpers.fake_gpus import gpus

__all__ = ["gpus"]
