"""A bound on how long waiting threads spin, which must be set before PyTorch is imported."""

from __future__ import annotations

import os

# Each of these sets how OpenMP threads wait: if one of them is set, the user has chosen.
CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
BOUNDED = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}  # spins of GNU's OpenMP; ms of LLVM's and Intel's


def bound_spinning() -> None:
    """Let waiting OpenMP threads sleep soon, so that two programs on the same cores do not starve each other.

    By default they spin until the next parallel region. The libraries read the variables once, when they are
    loaded.
    """
    if not any(name in os.environ for name in CHOSEN_BY_USER):
        os.environ.update(BOUNDED)
