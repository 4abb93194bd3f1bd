"""Waiting threads: how long they spin before they sleep, chosen by the command before PyTorch is imported."""

from __future__ import annotations

import os

# Each of these says how OpenMP threads wait: with one of them set, the user has chosen.
CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
BOUNDED = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # iterations of GNU's; ms of LLVM's and Intel's


def bound_spinning() -> None:
    """Let waiting OpenMP threads sleep soon, so that two programs on the same cores do not starve each other.

    By default they spin until the next parallel region. The libraries read this once, when they are loaded.
    """
    if not any(name in os.environ for name in CHOSEN_BY_USER):
        os.environ.update(BOUNDED)
