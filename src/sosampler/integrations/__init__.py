"""Adapters for other libraries."""
