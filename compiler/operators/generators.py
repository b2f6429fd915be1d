"""Operators that generate values from sizes alone: random numbers and ranges."""

from __future__ import annotations

from splitc.compiler.operators.operator import Operator

OPERATORS = (
    Operator("Bernoulli", random=True),
    Operator("Multinomial", random=True),
    Operator("RandomNormal", random=True),
    Operator("RandomNormalLike", random=True),
    Operator("RandomUniform", random=True),
    Operator("RandomUniformLike", random=True),
    Operator("Range", shape_arithmetic=True, expands=True),
)
