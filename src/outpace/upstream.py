"""Log records of other libraries that say nothing to a user of this one."""

from __future__ import annotations

import logging


def silence_torchao() -> None:
    """Drop PyTorch's advice to the authors of torchao on enums, and nothing else.

    Where torchao is installed, importing Transformers imports it, and PyTorch 2.13 writes two such records.
    """
    logger = logging.getLogger("torch.utils._pytree")
    if _is_of_interest not in logger.filters:
        logger.addFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    subject = record.args[0] if isinstance(record.args, tuple) and record.args else None
    of_torchao = isinstance(subject, type) and subject.__module__.partition(".")[0] == "torchao"
    return not (of_torchao and "register_constant() on Enum subclasses" in str(record.msg))
