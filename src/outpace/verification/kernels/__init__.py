"""Verification as Triton kernels, launched by ``verification.triton``."""
