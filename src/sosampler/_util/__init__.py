"""Helpers that every part shares; no domain knowledge."""
