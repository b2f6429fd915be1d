"""Lowering: from a plan to each rank's graphs and program."""
