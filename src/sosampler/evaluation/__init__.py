"""Measure policies and baselines on a bank."""
