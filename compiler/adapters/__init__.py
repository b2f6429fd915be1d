"""Adapters (LoRA): the layers that they belong to, weights with them merged, and slots for them."""
