"""Run on a Ray cluster."""
