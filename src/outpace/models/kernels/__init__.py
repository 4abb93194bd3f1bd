"""Triton kernels for a model's forward passes, over few tokens and over prompts."""
