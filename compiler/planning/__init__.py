"""Decisions: budgets, the search over cuts, predicted times, the plan and its file."""
