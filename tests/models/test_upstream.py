"""Warnings that only an import of torchao causes are suppressed, and no others."""

from __future__ import annotations

import enum
import logging
import logging.handlers
import queue
import subprocess
import sys

import pytest
import torch

import outpace

WARNING = (
    "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value type. Calling "
    "register_constant() on Enum subclasses is deprecated and will be an error in a future release."
)


@pytest.mark.full
def test_importing_transformers_after_outpace_writes_nothing() -> None:
    pytest.importorskip("torchao")
    code = "import outpace, transformers.modeling_utils, sys; assert 'torchao' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("message", [WARNING, "%s: something else"])
@pytest.mark.parametrize("module", ["torchao.utils", "torchaos", "mine"])
def test_only_this_warning_about_torchao_is_suppressed(module: str, message: str) -> None:
    assert outpace.__version__  # imported, which is when the filter is set
    seen: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(seen)

    class Kind(enum.Enum):
        ONE = 1

    Kind.__module__ = module
    logger = logging.getLogger("torch.utils._pytree")
    logger.addHandler(handler)
    try:
        logger.warning(message, Kind)
    finally:
        logger.removeHandler(handler)
    assert (not seen.empty()) == (module != "torchao.utils" or message != WARNING)


@pytest.mark.parametrize("cuda", [None, "13.0"])
@pytest.mark.parametrize("message", ["Failed to load /x/_C_mxfp8.so: no", "something else"])
def test_libraries_for_cuda_are_only_missed_where_there_is_cuda(
    message: str, cuda: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert outpace.__version__
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with caplog.at_level(logging.WARNING, "torchao"):
        logging.getLogger("torchao").warning(message)
    assert bool(caplog.records) == (cuda is not None or message == "something else")
