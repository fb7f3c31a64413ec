"""Kernels of the frame engine; README.md explains them."""
