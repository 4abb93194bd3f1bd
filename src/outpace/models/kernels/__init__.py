"""Triton kernels for a model's forward pass over few tokens."""
