"""Adapters of low rank (LoRA): their files, and which of a model's layers they belong to."""
