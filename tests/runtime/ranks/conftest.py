from tests.helpers.mixtures import mixtures

__all__ = ["mixtures"]
