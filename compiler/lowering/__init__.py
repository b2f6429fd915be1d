"""Lowering: a plan becomes each rank's graphs and program."""
