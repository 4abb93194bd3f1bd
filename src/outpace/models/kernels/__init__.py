"""Triton kernels of a model's pass over few tokens."""
