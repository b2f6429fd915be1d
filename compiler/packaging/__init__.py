"""Rank graphs become engine files, and these a package that was tried."""
