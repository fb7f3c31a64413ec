"""Triton kernels for inference."""
