"""Activation checkpointing to a budget: predicted, traced and executed peaks over ten budgets."""
