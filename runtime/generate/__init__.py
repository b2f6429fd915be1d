"""Tokens and text from packages of language models."""
