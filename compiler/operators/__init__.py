"""The registry of operators: all that splitc knows of an operator, in one entry, which passes query (`operator_of`).

To add an operator, add an `Operator` to the table `OPERATORS` of its family's module. Its axes rule is a function of an
`Operation`: it relates, contracts or pins axes, and records what a rank must rewrite. Axes that a rule does not touch
are pinned, so a rule simply returns for a form of the operator that it can't handle. Add a tiny graph with the operator
to the table `GRAPHS` of its family's tests: a test of the registry fails without one.
"""
