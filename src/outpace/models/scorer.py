"""A scorer: a model with a KV cache, which computes the logits of a decode step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.models.kv_cache import KVCache, common_prefix_length
from outpace.models.source import Source

CHUNK = 512  # tokens of a prompt per forward pass
MIN_CHUNK = 32  # tokens of a prompt per forward pass of many prompts
MAX_PREFILL_TOKENS = 4096  # tokens of all prompts per forward pass, if MIN_CHUNK permits
MAX_PADDING = 2  # a prompt joins a forward pass if padding at most doubles its tokens
MIN_AWAITED_PREFIX = 256  # tokens; a prompt waits until a longer common prefix with another is computed


class WeightsMovedError(RuntimeError):
    """Error for a model whose weights moved while sequences were generated."""


@dataclass(frozen=True)
class Demand:
    """Memory that sequences need in a KV cache.

    Attributes:
        what: What needs it, for users.
        nbytes: Most bytes that it needs.
        budget: Most bytes of the KV cache.
    """

    what: str
    nbytes: int
    budget: int


class Scorer(ABC):
    """A model with a KV cache, which scores tokens after the committed tokens of each sequence.

    Each sequence has a slot, a small int that the caller picks. ``score`` computes logits of further tokens,
    and ``cache.commit`` then commits some of them. Tokens that are not committed, such as rejected draft
    tokens, are overwritten by the next call.

    Attributes:
        model: The Transformers model, as the caller passed it.
        base: The model without wrappers.
        config: Configuration of the model.
        vocab_size: Size of the vocabulary.
        context: Maximum number of tokens of a sequence.
        device: Device of the logits.
        dtype: Dtype of the weights.
        cache: The KV cache.
        has_kernels: Whether Triton kernels run the forward passes.
        has_encoder: Whether each sequence needs a source, which an encoder reads.
        takes_speech: Whether sources are features of speech.
        captures: Whether a CUDA graph can capture ``forward``.
    """

    model: Any
    base: Any
    config: Any
    vocab_size: int
    context: int
    device: torch.device
    dtype: torch.dtype
    cache: KVCache
    has_kernels: bool = False
    has_encoder: bool = False
    takes_speech: bool = False
    captures: bool = True

    def source(self, prompt: Any) -> Source:
        """Return the source of a prompt, checked for this model.

        Args:
            prompt: Token ids, features of speech, or a ``Source``.

        Raises:
            TypeError: The model does not take prompts of this kind.
            ValueError: Token ids or the shape of features do not suit the model.
        """
        raise TypeError(f"prompt: got a source; {type(self.base).__name__} has no encoder")

    @property
    def caches(self) -> list[KVCache]:
        """All KV caches: of the sequences, and of sources if those have one of their own."""
        return [self.cache]

    def demands(self, lengths: Sequence[int], sources: Sequence[Source | None]) -> list[Demand]:
        """Return the memory that sequences of these lengths and sources need in each KV cache."""
        what = f"{sum(lengths)} tokens of {type(self.base).__name__}"
        return [Demand(what, self.cache.bytes_for(lengths), self.cache.budget)]

    @property
    def version(self) -> int:
        """Number that changes when memory moves. Captured graphs are then invalid."""
        return sum(cache.version for cache in self.caches)

    @property
    def capture_seconds(self) -> float:
        """Seconds that captures of ``greedy`` and ``append_prompt`` took so far."""
        return 0.0

    @property
    def generation_config(self) -> Any:
        """The model's generation config, or None."""
        return getattr(self.base, "generation_config", None)

    @property
    def end_of_text(self) -> frozenset[int]:
        """Token ids with which the model ends a text."""
        ends = getattr(self.generation_config, "eos_token_id", None)
        if ends is None:
            ends = getattr(self.config, "eos_token_id", None)
        return frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)

    def attach(self, model: Any) -> None:
        """Attach the model of this scorer again, after ``detach``."""
        raise TypeError(f"{type(self).__name__} cannot be detached from its model")

    def detach(self) -> None:
        """Drop all references to the model, so that it can be freed."""
        raise TypeError(f"{type(self).__name__} cannot be detached from its model")

    # Forward passes

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """True if the scorer still fits its model: device, dtype, and how its forward passes run."""

    @property
    def layout(self) -> Hashable:
        """Value that changes if weights move, or layers or hooks change, while ``is_current`` stays True."""
        return None

    @abstractmethod
    def check_weights(self) -> None:
        """Discard cached prefixes if weights have changed.

        Raises:
            WeightsMovedError: The scorer no longer fits its model.
        """

    def check_placed(self) -> None:
        """Raise ``WeightsMovedError`` if a forward pass would fail because weights moved."""
        return

    def _moved(self) -> WeightsMovedError:
        return WeightsMovedError(
            f"{type(self.base).__name__}: its weights moved, or its layers changed, while sequences were "
            "generated; wait for them to end, then call again"
        )

    @abstractmethod
    def append(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append at least one token to each sequence, and commit it. Sequences may get different numbers.

        Args:
            slots: Slots of the sequences.
            tokens: New token ids of each sequence.

        Returns:
            Logits ``[R, V]`` after the last token of each sequence.
        """

    @abstractmethod
    def score(self, slots: Sequence[int], tokens: Tensor, prefill: bool = False) -> Tensor:
        """Score tokens that follow the committed ones, without committing them.

        Args:
            slots: Slots of the sequences.
            tokens: Token ids ``[R, n]``.
            prefill: Whether to use the kernels of a prefill, which any number of tokens shares.

        Returns:
            Logits ``[R, n, V]`` after each token.
        """

    def append_scored(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a sequence, and commit them.

        Args:
            slot: Slot of the sequence.
            tokens: New token ids, at most ``CHUNK``.

        Returns:
            Logits ``[n, V]`` after each token.
        """
        # Forward passes of other rows may overwrite the last entry of an idle row.
        self.cache.reserve([slot], [self.cache.length(slot) + len(tokens) + 1])
        logits = self.score([slot], torch.tensor([tokens], device=self.device), prefill=True)
        self.cache.commit(slot, len(tokens), tokens)
        return logits[0]

    def append_prompt(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """Append tokens of prompts as ``append`` does. The forward pass may be a graph, without logits.

        Args:
            slots: Slots of the sequences.
            tokens: New token ids of each sequence, at most ``CHUNK``, and within the model's context.

        Returns:
            Logits ``[R, V]`` after the last token of each sequence, or None.
        """
        return self.append(slots, tokens)

    def greedy(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], count: int) -> Tensor:
        """Append tokens to each sequence, and then the likeliest tokens, and commit all but the last.

        Args:
            slots: Slots of the sequences.
            tokens: New token ids of each sequence, at least one.
            count: Number of the likeliest tokens.

        Returns:
            Each of them, and 1 if its logits were finite, else 0: ``[R, count, 2]``.
        """
        logits, found = self.append(slots, tokens), list[Tensor]()
        for i in range(count):
            best, token = logits.max(-1)
            found.append(torch.stack((token, best.isfinite().long()), dim=1))
            if i < count - 1:
                logits = self.score(slots, token[:, None])[:, 0]
                for slot in slots:
                    self.cache.commit(slot, 1)
        return torch.stack(found, dim=1)

    @abstractmethod
    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run a forward pass that depends on tensors alone, so that a CUDA graph can capture it.

        Args:
            ids: Token ids ``[B, n]`` of the first B slots.
            positions: Their positions ``[B, n]``, consecutive in each row. Idle slots have -1.

        Returns:
            Logits ``[B, n, V]`` after each token.
        """

    def prepare(self, slots: int, tokens: int) -> None:
        """Prepare for sequences of up to ``tokens`` tokens in the first slots, so that no memory moves."""
        self.cache.prepare(slots, tokens)

    def arrange(self, slots: int) -> None:
        """Arrange the KV cache of the first slots for ``forward``, before it is called or replayed."""
        return

    def launch_once(self, B: int, n: int) -> Tensor | None:
        """Launch each kernel of a prefill and of a forward pass once, so that it is compiled.

        Args:
            B: Number of rows of the forward pass.
            n: Number of tokens of a row.

        Returns:
            Logits ``[B, n, V]`` with undefined values. None: there are no kernels to compile.
        """
        return None

    def fill(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> None:
        """Run a forward pass as ``forward`` does, which fills the KV cache and returns no logits.

        Args:
            ids: Token ids ``[B, n]``.
            positions: Their positions ``[B, n]``. Padding at the end of a row has -1.
            slots: The rows' slots ``[B]``, if there are Triton kernels. By default the first B slots.
        """
        self.forward(ids, positions)

    def prefill(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Source | None] = (),
    ) -> Tensor:
        """Prefill free slots with prompts, and commit the prompts.

        Cached prefixes of the prompts are reused.

        Args:
            slots: Slots of the sequences.
            prompts: Token ids of each sequence.
            sources: Encoder inputs, for encoder-decoder models.

        Returns:
            Logits ``[R, V]`` after the last token of each prompt.
        """
        prefill = Prefill(self, slots, prompts, sources)
        while not prefill.advance():
            pass
        return prefill.logits()

    def encode_sources(self, slots: Sequence[int], sources: Sequence[Source | None], tokens: int) -> None:
        """Run the encoder, where the model has one, before slots are prefilled with ``tokens`` tokens."""
        return

    def has_source(self, slot: int) -> bool:
        """Return whether the encoder's output for a slot is cached."""
        return False

    def num_unencoded(self, source: Source | None) -> int:
        """Return the length of a source that the encoder has yet to process, in tokens or frames."""
        return 0

    def open(self, slot: int, prompt: Sequence[int], source: Source | None) -> int:
        """Start a sequence in a free slot; return how many first tokens need no forward pass."""
        return self.cache.open(slot, prompt)

    def reset(self, slots: Sequence[int], texts: Sequence[Sequence[int]] | None = None) -> None:
        """Free slots.

        Args:
            slots: Slots to free.
            texts: Token ids of the sequences. With them, a later prompt may reuse the KV cache. Without them,
                the KV cache of the slots is zeroed, apart from shared blocks.
        """
        for i, slot in enumerate(slots):
            self.cache.close(slot, None if texts is None else texts[i])

    # Memory

    def forget(self) -> None:
        """Discard cached prefixes, so that no later prompt reuses them."""
        self.cache.forget()

    def pack(self) -> None:
        """Pack the weights for forward passes over few tokens, where this kind of scorer can."""
        return

    def repack(self) -> None:
        """Pack the weights again if they were packed, since they may have changed."""
        return

    def release(self) -> None:
        """Free the KV cache. No sequence may be active."""
        for cache in self.caches:
            cache.release()

    @abstractmethod
    def describe(self) -> str:
        """Return one line for a user: the model, its device, and the cost of its KV cache."""


class Prefill:
    """Prompts that are prefilled together, one forward pass at a time.

    Equal prompts are computed once, and so are long common prefixes.

    Args:
        scorer: The model.
        slots: Free slots, one per prompt.
        prompts: Token ids of each prompt.
        sources: Encoder inputs, for encoder-decoder models.
        leave_last: Leave out the last token of each prompt, which the first decode step then feeds.
        append: Runs a forward pass as ``Scorer.append`` does. It may return None instead of logits, if they
            are not needed.
    """

    def __init__(
        self,
        scorer: Scorer,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Source | None] = (),
        leave_last: bool = False,
        append: Callable[[Sequence[int], Sequence[Sequence[int]]], Tensor | None] | None = None,
    ) -> None:
        self.scorer, self.slots, self.prompts = scorer, list(slots), prompts
        self._append = scorer.append if append is None else append
        scorer.check_weights()
        scorer.cache.prepare(max(slots) + 1, max(map(len, prompts)))
        self._sources = sources or [None] * len(prompts)
        first: dict[tuple[int, ...], int] = {}  # by prompt, the index of the one that is computed
        self._owners = [
            i if source is not None else first.setdefault(tuple(prompt), i)
            for i, (prompt, source) in enumerate(zip(prompts, self._sources, strict=True))
        ]
        self._leave_last = leave_last
        self._waiting = sorted(set(self._owners))  # indices of prompts that have not started
        self._rest: dict[int, Sequence[int]] = {}  # by index: tokens that still need a forward pass
        self._logits: dict[int, Tensor] = {}  # by index
        self._complete = False
        self._start()

    def _start(self) -> None:
        """Start all prompts that do not wait for a common prefix."""
        waiting, self._waiting = self._waiting, []
        for i in waiting:
            if self._awaits_prefix(i):
                self._waiting.append(i)
            else:
                prompt = self.prompts[i]
                cached = self.scorer.open(self.slots[i], prompt, self._sources[i])
                self._rest[i] = prompt[cached : len(prompt) - self._leave_last]

    def _awaits_prefix(self, i: int) -> bool:
        """Return whether other prompts will compute many tokens of prompt i that the KV cache lacks."""
        if self._sources[i] is not None:
            return False
        prompt, computed, awaited = self.prompts[i], 0, 0
        for other, rest in self._rest.items():
            length = common_prefix_length(prompt, self.prompts[other], len(prompt))
            done = len(self.prompts[other]) - self._leave_last - len(rest)
            computed, awaited = max(computed, min(length, done)), max(awaited, length)
        return awaited - computed >= MIN_AWAITED_PREFIX

    def advance(self) -> bool:
        """Run a forward pass over the next tokens; return whether the prompts are complete."""
        if self._complete:
            return True
        left = {i: rest for i, rest in self._rest.items() if rest}
        if left:
            chunk = min(CHUNK, max(MIN_CHUNK, MAX_PREFILL_TOKENS // len(left)))
            counts = {i: min(chunk, len(rest)) for i, rest in left.items()}
            longest = max(counts.values())
            joint = [i for i, count in counts.items() if count * MAX_PADDING >= longest]
            logits = self._append([self.slots[i] for i in joint], [left[i][: counts[i]] for i in joint])
            self._rest |= {i: left[i][counts[i] :] for i in joint}
            if logits is not None:
                self._logits |= dict(zip(joint, logits, strict=True))
            self._start()
        if any(self._rest.values()) or self._waiting:
            return False
        for i, owner in enumerate(self._owners):
            if i != owner:
                self.scorer.cache.fork(self.slots[owner], self.slots[i])
        self._complete = True
        return True

    def logits(self) -> Tensor:
        """Return the logits ``[R, V]`` after the last token of each prompt."""
        unique = sorted(self._logits)
        logits = torch.stack([self._logits[i] for i in unique])
        if len(unique) == len(self.slots):
            return logits
        return logits[[unique.index(owner) for owner in self._owners]]
