"""Transformers' loaders: the Auto class for a config, and control of what the loaders print."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def auto_class(config: Any) -> Any:
    """Return Transformers' Auto class for models with this config."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else AutoModelForSeq2SeqLM


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Transformers' progress bars and warnings."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def gguf_reading() -> Iterator[None]:
    """Make Transformers parse a GGUF file only once, and show its progress bar only on a terminal.

    Transformers parses the file for the config, the tokenizer and the weights in turn. Each parse takes many
    seconds with a large vocabulary. The bar over the tensors comes from tqdm itself, so ``quiet`` does not
    reach it.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading

    tqdm, reader = reading.tqdm, gguf.GGUFReader
    parse_once = functools.cache(reader)
    reading.tqdm = functools.partial(tqdm, disable=None)  # None: off where stderr is no terminal
    gguf.GGUFReader = lambda path: parse_once(os.path.realpath(path))  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        reading.tqdm = tqdm
        gguf.GGUFReader = reader  # type: ignore[misc]


def silence_torchao() -> None:
    """Hide log records that importing torchao causes and that no user can act on.

    Where torchao is installed, importing Transformers imports it. PyTorch 2.13 then warns of torchao's enums.
    Where PyTorch has no CUDA, torchao warns that its libraries for CUDA cannot be loaded.
    """
    for name, is_of_interest in (("torch.utils._pytree", _is_no_enum), ("torchao", _is_no_cuda_library)):
        logger = logging.getLogger(name)
        if is_of_interest not in logger.filters:
            logger.addFilter(is_of_interest)


def _is_no_cuda_library(record: logging.LogRecord) -> bool:
    torch: Any = sys.modules.get("torch")
    has_cuda = torch is None or torch.version.cuda is not None
    return has_cuda or not str(record.msg).startswith("Failed to load ")


def _is_no_enum(record: logging.LogRecord) -> bool:
    subject = record.args[0] if isinstance(record.args, tuple) and record.args else None
    of_torchao = isinstance(subject, type) and subject.__module__.partition(".")[0] == "torchao"
    return not (of_torchao and "register_constant() on Enum subclasses" in str(record.msg))
