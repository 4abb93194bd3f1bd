"""A cache of encoder outputs, so that each window of sound is encoded once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput


class EncoderCache:
    """The encoder outputs of the most recent windows of sound.

    Whisper detects the language in one forward pass. Each temperature of a fallback is another forward pass
    over the same sound.

    Args:
        encoders: Encoders whose outputs are cached.
        windows: Number of windows to cache for each encoder.
    """

    def __init__(self, encoders: list[Any], windows: int) -> None:
        self.encoders, self.windows = encoders, windows
        self._states: dict[tuple[int, bytes], Tensor] = {}  # by encoder and sound, `[S, D]`

    @contextmanager
    def use(self) -> Iterator[None]:
        """Cache the encoder outputs of this thread inside a ``with`` block, and clear the cache at its end.

        The cache does not affect other threads that run the same encoders.
        """
        with ExitStack() as stack:
            stack.callback(self._states.clear)
            for i, encoder in enumerate(self.encoders):
                cached_forward = self._cached_forward(i, encoder.forward)
                # setdefault is atomic, as another thread may do the same. It keeps an earlier hook.
                if encoder.__dict__.setdefault("forward", cached_forward) is cached_forward:
                    stack.callback(encoder.__dict__.pop, "forward", None)
            yield

    def _cached_forward(self, index: int, forward: Any) -> Any:
        thread = threading.get_ident()

        def forward_with_cache(*args: Any, **kwargs: Any) -> Any:
            more = any(kwargs.get(name) for name in ("output_attentions", "output_hidden_states"))
            if more or threading.get_ident() != thread:
                return forward(*args, **kwargs)
            input_features: Tensor = args[0] if args else kwargs.pop("input_features")
            keys = [(index, _digest(row)) for row in input_features]
            new = {key: row for key, row in zip(keys, input_features, strict=True) if key not in self._states}
            # On a CPU one window keeps all cores busy, and several do not fit its caches.
            batch_size = 1 if input_features.device.type == "cpu" else len(keys)
            while new:
                batch = [new.popitem() for _ in range(min(batch_size, len(new)))]
                states = forward(torch.stack([row for _, row in batch]), **kwargs).last_hidden_state
                self._states |= zip((key for key, _ in batch), states, strict=True)
            outputs = torch.stack([self._states[key] for key in keys])
            while len(self._states) > self.windows * len(self.encoders):
                del self._states[next(iter(self._states))]
            return BaseModelOutput(last_hidden_state=outputs)

        return forward_with_cache


def _digest(row: Tensor) -> bytes:
    content = row.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=16).digest()
