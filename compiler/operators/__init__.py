"""What is known of operators: one entry each, which all passes ask (`registry.operator_of`).

To add an operator, add an `Operator` to the table `OPERATORS` of its family's module. Its axes rule is a function of an
`Operation`: it relates axes, contracts or pins them, and records what a rank must rewrite. What a rule did not touch is
pinned, so a rule that meets a form that it can't follow just returns. A tiny graph of it goes to the table `GRAPHS` of
its family's tests, without which a test of the registry fails.
"""
