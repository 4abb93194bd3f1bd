"""Verification as Triton kernels, launched by `outpace.verify.triton`: pieces, cuts, rules and draws."""
