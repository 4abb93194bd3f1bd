"""Checks of flag values that do not import PyTorch, so that a wrong value is refused at once.

Most functions here are callbacks of options. They return the value to use, or raise. The Python API checks
the values again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from outpace.checks.errors import RANGES, suggestion
from outpace.models.hub import DTYPES as DTYPES

RULES = ("token", "block", "match")
FOR_COMPARISON = "rejection"  # a rule that messages do not offer
DEVICES = ("cpu", "cuda", "hpu", "mps", "npu", "xla", "xpu")  # types; an index may follow


def number(name: str) -> Callable[[Any], Any]:
    """Return the callback of a flag whose range is in ``RANGES``. It checks one value or a list of them."""
    flag, (fits, ok) = f"--{name.split()[-1].replace('_', '-')}", RANGES[name]

    def check(value: Any) -> Any:
        for one in _each(value):
            if math.isnan(one) or not ok(one):
                raise ValueError(f"{flag}: got {one!r}; it must be {fits}")
        return value

    return check


def rule(value: str | None) -> str | None:
    """Return the name of a verification rule, checked; None if it was left out."""
    if value is None or value in (*RULES, FOR_COMPARISON):
        return value
    error = ValueError(
        f'--rule: got {value!r}; it must be "token", "block", "match" or "sigmoid(ALPHA, BETA)"'
        f"{suggestion(value, RULES)}"
    )
    call = re.fullmatch(r"sigmoid\(([^,]+),([^,]+)\)", value)
    if call is None:
        raise error
    try:
        low, high = map(float, call.groups())
    except ValueError:
        raise error from None
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"--rule: got {value!r}; it must have finite numbers with ALPHA < BETA")
    return value


def num_draft_tokens(value: Any) -> Any:
    """Return a number of draft tokens or a policy, or a list of them, checked."""
    for one in _each(value):
        if not re.fullmatch(r"\d+|auto|heuristic(:0*[1-9]\d*)?", one):
            raise ValueError(
                f"--num-draft-tokens: got {one!r}; it must be a number, auto, heuristic, or "
                f"heuristic:START with START >= 1{suggestion(one, ('auto', 'heuristic'))}"
            )
    return value


def device(value: str | None) -> str | None:
    """Return the name of a device, checked for spelling only; the device may be missing. None is "auto"."""
    if value == "auto":
        return None
    if value == "meta":
        raise ValueError("--device: meta holds no weights")
    if value is not None and not re.fullmatch(rf"({'|'.join(DEVICES)})(:\d+)?", value):
        raise ValueError(f'--device: got {value!r}; it must be "auto", "cpu", "cuda", "cuda:1", ...')
    return value


def dtype(value: Any) -> Any:
    """Return the full name of a dtype, or of each in a list; None stays None."""
    from outpace.models.hub import DTYPES

    if isinstance(value, list | tuple):
        return [dtype(one) for one in value]
    if value is not None and value not in DTYPES:
        raise ValueError(
            f'--dtype: got {value!r}; it must be "float32", "bfloat16" or "float16" '
            f"(fp32, float, bf16, fp16, half){suggestion(value, DTYPES)}"
        )
    return value and DTYPES[value]


def bias(value: Sequence[str] | None) -> Sequence[str] | None:
    """Return the values of --logit-bias, checked."""
    for one in value or ():
        logit_bias(one)
    return value


def logit_bias(text: str) -> tuple[int, float]:
    """Return the token id and the bias of a text such as 42=-1.5."""
    token, _, added = text.partition("=")
    try:
        found = int(token), float(added)
    except ValueError:
        raise ValueError(f"--logit-bias: got {text!r}; it must be like 42=-1.5 or 42=-inf") from None
    fits, ok = RANGES["logit_bias"]
    if found[0] < 0 or not ok(found[1]):
        raise ValueError(f"--logit-bias: got {text!r}; it must be a token id >= 0 and {fits}")
    return found


def stop(value: Sequence[str] | None) -> Sequence[str] | None:
    """Return stop strings, checked."""
    if not all(value or ()):
        raise ValueError("--stop: it is empty; a stop string has at least one character")
    for one in value or ():
        check_text("--stop", one)
    return value


def check_text(name: str, text: str | None) -> None:
    """Refuse text that Python decoded from bytes that are not UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text or ""):
        raise ValueError(f"{name}: not text in UTF-8")


def _each(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)
