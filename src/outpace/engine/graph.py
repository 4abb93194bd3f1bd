"""The graph executor: a whole decode step as one function of tensors, on CUDA as one graph.

Drafting, the target's forward pass, verification and commit run without the host. The host only starts steps,
and reads the small result of one step while the next one runs. All sequences of a step have the same number
of draft tokens, g. A slot becomes idle once the host has seen the end of its sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outpace.draft.base import fit
from outpace.draft.lookup import lookup_draft
from outpace.engine.capture import Graphs
from outpace.engine.inputs import DraftInputs, HostDraft
from outpace.engine.pending import DeviceEvent, Pending
from outpace.models.causal import MIN_COPIED_PREFIX, common_prefix_length, longest_shared_prefix
from outpace.sampling import SamplingParams
from outpace.verification import Rule, SampledTokens, Verdict, sample, verify
from outpace.verification.rules import parse

CHUNK = 512  # tokens of a prompt per forward pass
MAX_PREFILL_TOKENS = 4096  # tokens of several prompts per forward pass
MIN_CHUNK = 32  # tokens of the smallest chunk that has a graph
MAX_PADDING = 2  # padded tokens per prompt token, up to which prompts are prefilled together


class Model(Protocol):
    """A model of the graph executor: ``fused.FusedModel``, or ``generic.GenericModel`` for any other."""

    vocab_size: int
    device: torch.device

    def allocate_cache(self, rows: int, tokens: int) -> Any:
        """Return a KV cache for ``rows`` sequences of at most ``tokens`` tokens.

        It has ``part(i, n, T)``, a view of n rows from row i on with at most T tokens. ``copy(i, j, n)``
        copies the first n tokens of row i to row j. ``wipe()`` fills it with zeros.
        """

    def fill_cache(self, ids: Tensor, positions: Tensor, cache: Any) -> None:
        """Write tokens ``[B, n]`` at positions ``[B, n]`` to the first B rows of the KV cache."""

    def logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Write tokens to the KV cache as ``fill_cache`` does, and return their logits ``[B, n, V]``."""


@dataclass(frozen=True)
class State:
    """State of the sequences that take part in a step: views of the engine's tensors."""

    lengths: Tensor
    seeds: Tensor
    active: Tensor
    last: Tensor  # [rows, 2], the last two tokens
    token_ids: Tensor  # [rows, max_tokens], prompt and output; [rows, 0] without prompt lookup

    @classmethod
    def of(cls, engine: Engine, rows: int) -> State:
        """Return views of an engine's first rows."""
        all_rows = engine.lengths, engine.seeds, engine.active, engine.last, engine.token_ids
        return cls(*(tensor[:rows] for tensor in all_rows))


class StepKey(NamedTuple):
    """The key of a step's graph.

    Attributes:
        g: Number of draft tokens per sequence.
        slots: Number of slots that take part.
        sampling: Sampling parameters of all sequences.
        host_buffers: The id of the buffers for draft tokens from the host. None if the engine drafts.
    """

    g: int
    slots: int
    sampling: SamplingParams
    host_buffers: int | None


class Engine:
    """The graph executor: a fixed number of slots, whose sequences are decoded as one batch.

    A step without draft tokens does not run the draft model. After such steps, ``catch_up`` must run before
    the draft model drafts again.

    Args:
        target: The target model.
        draft: The draft model, or None.
        slots: The number of slots.
        max_tokens: Largest number of tokens of a sequence, prompt included.
        rule: As in ``Decoder``.
        lenience: As in ``Decoder``.
        lookup_ngrams: ``min_ngram`` and ``max_ngram`` of prompt lookup, which then replaces the draft model.
            With neither ``lookup_ngrams`` nor ``draft``, draft tokens can only come from the host.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        slots: int,
        max_tokens: int,
        *,
        rule: Rule | str = "token",
        lenience: float = 1.0,
        lookup_ngrams: tuple[int, int] | None = None,
    ) -> None:
        self.target, self.draft, self.lookup_ngrams = target, draft, lookup_ngrams
        self.slots, self.max_tokens = slots, max_tokens
        self.rule, self.lenience = parse(rule), lenience
        self.target_cache = target.allocate_cache(slots, max_tokens)
        self.draft_cache: Any = None if draft is None else draft.allocate_cache(slots, max_tokens)
        integers = torch.zeros(3, slots, dtype=torch.int64, device=target.device)
        self.lengths, self.seeds, self.active = integers[0], integers[1], integers[2]
        self.last = torch.zeros_like(integers[:2]).T.contiguous()  # [slots, 2], the last two tokens
        # [slots, max_tokens], prompt and output; [slots, 0] without prompt lookup
        self.token_ids = torch.zeros(
            slots, max_tokens if lookup_ngrams else 0, dtype=torch.int64, device=target.device
        )
        self.graphs = Graphs(target.device)
        # Values of g whose graphs are captured, valid while `graphs.version` is `_captured_version`
        self._captured_lengths: dict[tuple[int, SamplingParams, bool], frozenset[int]] = {}
        self._captured_version = 0
        # By chunk size: buffers of tokens and positions, which are the inputs of graphs
        self._chunk_buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._cached: dict[int, Sequence[int]] = {}  # by slot: the prefix that is valid in its KV caches
        # Buffers of draft tokens from the host, which are the inputs of graphs
        self._host_buffers: dict[tuple[int, SamplingParams | None, torch.dtype | None], DraftInputs] = {}

    def prefill(self, slot: int, tokens: Sequence[int], seed: int) -> None:
        """Prefill a sequence in a slot, without its last token, which the first step feeds."""
        self.prefill_all(slot, [tokens], [seed])

    @torch.inference_mode()
    def prefill_all(self, slot: int, texts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Prefill sequences in consecutive slots, from ``slot`` on."""
        for text in texts:
            if not 1 <= len(text) < self.max_tokens:
                raise ValueError(
                    f"texts: got {len(text)} tokens in a sequence; it must be 1 to {self.max_tokens - 1}"
                )
        with self._on_device():
            longest = max(map(len, texts))
            repeated = longest > MIN_COPIED_PREFIX and len(set(map(tuple, texts))) < len(texts)
            if (
                len(texts) > 1
                and not repeated
                and all(longest_shared_prefix(self._cached, text)[0] is None for text in texts)
                and len(texts) * longest <= MAX_PADDING * sum(map(len, texts))
            ):
                self._prefill_caches(slot, texts, 0)
            else:
                for i, text in enumerate(texts, slot):
                    self._prefill_caches(i, [text], self._reuse_prefix(i, text))
        for i, (text, seed) in enumerate(zip(texts, seeds, strict=True), slot):
            ids = torch.tensor(text, device=self.target.device)
            if self.lookup_ngrams is not None:
                self.token_ids[i, : len(text)] = ids
            self.lengths[i] = len(text)
            self.last[i] = ids[[-2, -1]] if len(text) > 1 else ids[[-1, -1]]
            self.seeds[i] = seed
            self.active[i] = 1

    def _prefill_caches(self, slot: int, texts: Sequence[Sequence[int]], num_cached: int) -> None:
        """Run sequences without their last tokens through the models, from token ``num_cached`` on.

        Shorter sequences are padded. Their KV caches get garbage past their lengths, which later tokens
        overwrite.
        """
        for i in range(slot, slot + len(texts)):
            self._cached.pop(i, None)  # in case this is interrupted
        longest = max(map(len, texts)) - 1
        ids = torch.tensor([[*text, *[text[-1]] * (longest + 1 - len(text))] for text in texts])
        ids = ids.to(self.target.device)
        chunk = max(1, min(CHUNK, MAX_PREFILL_TOKENS // len(texts)))
        for first in range(num_cached, longest, chunk):
            self._prefill_chunk(slot, ids[:, first : min(first + chunk, longest)], first, chunk)
        self._cached |= {i: text[:-1] for i, text in enumerate(texts, slot)}

    def _prefill_chunk(self, slot: int, ids: Tensor, first: int, chunk: int) -> None:
        """Run tokens ``[B, n]`` at positions from ``first`` on through the models.

        Graphs are used only if all slots take part, and only for a few chunk sizes. This limits their number.
        """
        B, n = ids.shape
        as_graph = self.graphs.enabled and self.slots == B
        size = min(chunk, max(MIN_CHUNK, _next_power_of_two(n))) if as_graph else n
        # Positions that these tokens attend to
        attended = min(_next_power_of_two(max(first + size, CHUNK)), self.max_tokens)
        positions = torch.arange(first, first + size, device=ids.device).clamp(max=attended - 1).expand(B, -1)
        if as_graph:
            if size not in self._chunk_buffers:
                self._chunk_buffers[size] = ids.new_zeros(B, size), ids.new_zeros(B, size)
            buffers = self._chunk_buffers[size]
            buffers[0][:, :n], buffers[0][:, n:] = ids, ids[:, -1:]  # the second is padding past the ends
            buffers[1].copy_(positions)
            ids, positions = buffers

        def read() -> Tensor:
            for model, cache in self._models():
                model.fill_cache(self._known_ids(ids, model), positions, cache.part(slot, B, attended))
            return ids

        if as_graph:
            self.graphs.run((size, attended), read, f"prefill of {size} tokens")
        else:
            read()

    def _models(self) -> list[tuple[Model, Any]]:
        """Return the models, each with its KV cache."""
        draft = [] if self.draft is None else [(self.draft, self.draft_cache)]
        return [(self.target, self.target_cache), *draft]

    def _reuse_prefix(self, slot: int, text: Sequence[int]) -> int:
        """Return how many first tokens of a sequence need no prefill in a slot.

        The slot's KV caches hold them already, or they are copied from another slot.
        """
        own = common_prefix_length(self._cached.get(slot, ()), text, len(text) - 1)
        best, shared = longest_shared_prefix(self._cached, text)
        if best is None or shared < own + MIN_COPIED_PREFIX:
            return own
        self._cached.pop(slot, None)  # in case this is interrupted
        for _, cache in self._models():
            cache.copy(best, slot, shared)
        return shared

    @torch.inference_mode()
    def end(self, slot: int, tokens: Sequence[int] = (), wipe: bool = False) -> None:
        """End the sequence of a slot, which is then idle.

        A later sequence that starts with the same tokens reuses the KV caches.

        Args:
            slot: The slot.
            tokens: The tokens that the KV caches hold, for reuse.
            wipe: True fills the slot's KV caches with zeros, because they may contain NaN.
        """
        self.active[slot] = 0
        if tokens:  # the KV caches lack the last token, and the draft model's may lack the one before it
            self._cached[slot] = tokens[:-2]
        if wipe:
            self._cached.pop(slot, None)
            for _, cache in self._models():
                cache.part(slot, 1, self.max_tokens).wipe()

    def forget(self) -> None:
        """Discard the cached prefixes of all slots."""
        self._cached.clear()

    @property
    def catch_up_chunk(self) -> int:
        """Tokens per sequence and forward pass of ``catch_up``; one graph serves all chunks."""
        return min(MIN_CHUNK, self.max_tokens)

    def num_catch_up_chunks(self, missing: int) -> int:
        """Return the number of forward passes of ``catch_up`` for ``missing`` tokens."""
        return -(-missing // self.catch_up_chunk)

    @torch.inference_mode()
    def catch_up(self, texts: Mapping[int, Sequence[int]], missing: int, slots: int | None = None) -> float:
        """Run the draft model over tokens that were generated without it.

        The very last two tokens are left out, since every step feeds them. No step may be in flight.

        Args:
            texts: The tokens of sequences, by slot.
            missing: Largest number of tokens of a sequence that the draft model has not processed.
            slots: The number of first slots that take part. By default all.

        Returns:
            The seconds that captures took.
        """
        if self.draft is None:
            return 0.0
        draft, cache = self.draft, self.draft_cache
        attended = min(_next_power_of_two(max(*map(len, texts.values()), CHUNK)), self.max_tokens)
        size = self.catch_up_chunk
        slots = self.slots if slots is None else slots
        for slot in range(slots):
            if slot not in texts:
                self._cached.pop(slot, None)  # its KV cache is overwritten
        if size not in self._chunk_buffers:
            shape = self.slots, size
            self._chunk_buffers[size] = self.last.new_zeros(shape), self.last.new_zeros(shape)
        tokens, positions = (buffer[:slots] for buffer in self._chunk_buffers[size])

        def read() -> Tensor:
            draft.fill_cache(self._known_ids(tokens, draft), positions, cache.part(0, slots, attended))
            return tokens

        capture_seconds = 0.0
        for chunks_left in range(self.num_catch_up_chunks(missing), 0, -1):
            # Sequences with fewer missing tokens process some tokens again, with the same result. Short ones
            # also get garbage past their ends, which later tokens overwrite.
            firsts = [len(texts.get(slot, ())) - 2 - chunks_left * size for slot in range(slots)]
            at = [[max(0, first) + i for i in range(size)] for first in firsts]
            ids = [
                [texts[slot][i] if slot in texts and i < len(texts[slot]) else 0 for i in indices]
                for slot, indices in enumerate(at)
            ]
            tokens.copy_(torch.tensor(ids))
            positions.copy_(torch.tensor(at))
            with self._on_device():
                key = "catch up", slots, attended
                capture_seconds += self.graphs.run(key, read, f"catch-up of {size} tokens")[1]
        return capture_seconds

    @torch.inference_mode()
    def start(
        self,
        g: int,
        sampling: SamplingParams,
        slots: int | None = None,
        host_draft: HostDraft | None = None,
    ) -> Pending:
        """Start a step and return at once.

        Args:
            g: Number of draft tokens per sequence. 0 decodes without speculation. It is taken as 0 if there
                are no draft tokens from the host and the engine cannot draft.
            sampling: Sampling parameters of all sequences.
            slots: The number of first slots that take part. By default all.
            host_draft: Draft tokens from the host, up to g per sequence, instead of the engine's own.

        Returns:
            The step, whose outcome can be read later.

        Raises:
            ValueError: ``sampling`` has penalties, a logit bias or processors, or ``slots`` is out of range.
        """
        if sampling.logit_bias or sampling.reads_prefix:
            raise ValueError(
                "sampling: got penalties, a logit bias or processors; it must have none of them, because the "
                "graph executor samples without the host"
            )
        slots = self.slots if slots is None else slots
        if not 1 <= slots <= self.slots:
            raise ValueError(f"slots: got {slots}; it must be 1 to {self.slots}")
        if self.draft is None and self.lookup_ngrams is None and host_draft is None:
            g = 0
        with self._on_device():
            proposals = None if host_draft is None else self._copy_host_draft(g, host_draft)
            key = StepKey(g, slots, sampling, None if proposals is None else id(proposals))
            started = DeviceEvent(self.target.device)
            result, capture_seconds = self.graphs.run(
                key,
                lambda: self.step(g, sampling, slots, proposals),
                f"a step with {g} draft tokens and {slots} slots",
                (self.lengths, self.last),
            )
            return Pending(result, started, capture_seconds)

    @property
    def is_async(self) -> bool:
        """True if a started step runs while the host does something else."""
        return self.graphs.enabled

    def captured_lengths(
        self, sampling: SamplingParams, slots: int, from_host: bool
    ) -> frozenset[int] | None:
        """Return the numbers of draft tokens whose steps need no capture; None if no step ever does.

        Args:
            sampling: Sampling parameters of all sequences.
            slots: Number of slots that take part.
            from_host: Whether the draft tokens come from the host.
        """
        if not self.graphs.enabled:
            return None
        if self._captured_version != self.graphs.version:
            self._captured_lengths, self._captured_version = {}, self.graphs.version
        key = slots, sampling, from_host
        if key not in self._captured_lengths:
            steps = (graph for graph in self.graphs if isinstance(graph, StepKey))
            self._captured_lengths[key] = frozenset(
                step.g for step in steps if (step.slots, step.sampling, step.host_buffers is not None) == key
            )
        return self._captured_lengths[key]

    def _copy_host_draft(self, g: int, host_draft: HostDraft) -> DraftInputs:
        """Copy draft tokens from the host to the buffers that are inputs of graphs.

        Slots without draft tokens get length 0.
        """
        draft, slots = host_draft.draft, list(host_draft.slots)
        key = g, host_draft.sampling, None if draft.logits is None else draft.logits.dtype
        if key not in self._host_buffers:
            logits = None
            if draft.logits is not None:
                logits = draft.logits.new_zeros(self.slots, g, self.target.vocab_size)
            tokens = self.last.new_zeros(self.slots, g)
            no_lengths = tokens.new_zeros(self.slots)
            self._host_buffers[key] = DraftInputs(tokens, logits, (), no_lengths, host_draft.sampling)
        buffers = self._host_buffers[key]
        assert buffers.lengths is not None
        lengths = torch.zeros(self.slots, dtype=torch.int64)
        lengths[slots] = torch.tensor(draft.lengths or [g] * len(slots))
        buffers.lengths.copy_(lengths)
        buffers.tokens[slots] = draft.tokens.to(buffers.tokens.device)
        if buffers.logits is not None and draft.logits is not None:
            buffers.logits[slots] = draft.logits
        return buffers

    @torch.inference_mode()
    def step(
        self, g: int, sampling: SamplingParams, slots: int, host_draft: DraftInputs | None = None
    ) -> Tensor:
        """Run one step: draft g tokens, target forward pass, verification, commit.

        Returns:
            The outcome, in the format that ``Pending`` reads.
        """
        state = State.of(self, slots)
        # Positions of the last two tokens and of the draft tokens. Idle slots may be clamped to the last one.
        positions = (state.lengths[:, None] + torch.arange(-2, g, device=state.last.device)).clamp(
            0, self.max_tokens - 1
        )
        if host_draft is None:
            proposals = self.propose(g, sampling, state, positions)
        else:
            proposals = host_draft.first(slots)
        scored = torch.cat((state.last[:, 1:], proposals.tokens), dim=1)  # [slots, g+1]
        p = self.target.logits(scored, positions[:, 1:], self.target_cache)  # [slots, g+1, V]
        verdict = self._verify(proposals, p, sampling, state)
        if self.lookup_ngrams is not None:
            at = state.lengths[:, None] + torch.arange(g + 1, device=p.device)
            new = torch.cat((proposals.tokens, verdict.next_token[:, None]), dim=1)
            new = new.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
            state.token_ids.scatter_(1, at.clamp(max=self.max_tokens - 1), new)
        previous = scored.gather(1, verdict.accepted[:, None])  # the token before the next one
        active = state.active[:, None].bool()
        state.last.copy_(
            torch.where(active, torch.cat((previous, verdict.next_token[:, None]), dim=1), state.last)
        )
        state.lengths.add_((verdict.accepted + 1) * state.active)
        drafted = torch.full_like(verdict.accepted, g) if proposals.lengths is None else proposals.lengths
        counts = torch.stack((verdict.accepted, verdict.next_token, verdict.bad.long(), drafted), dim=1)
        return torch.cat((counts, proposals.tokens), dim=1)

    def propose(self, g: int, sampling: SamplingParams, state: State, positions: Tensor) -> DraftInputs:
        """Propose g draft tokens for each sequence.

        The draft model's first forward pass is over the last two tokens, since its KV cache may lack both.
        """
        if self.lookup_ngrams is not None and g:
            tokens, lengths = lookup_draft(state.token_ids, state.lengths, g, *self.lookup_ngrams)
            return DraftInputs(tokens, lengths=lengths)
        if self.draft is None or g == 0:
            return DraftInputs(state.last[:, :0])
        ids = self._known_ids(state.last, self.draft)
        tokens_by_step, logits, drawn = [], [], list[SampledTokens]()
        for i in range(g):
            at = positions[:, :2] if i == 0 else positions[:, i + 1 : i + 2]
            q = fit(self.draft.logits(ids, at, self.draft_cache)[:, -1], self.target.vocab_size)
            if self.rule.name == "match":
                # With the target's own noise the draft model is likelier to sample the target's token.
                verdict = self._sample_as_target(q, state.lengths + i, sampling, state)
                tokens_by_step.append(verdict.next_token)
            else:
                drawn.append(sample(q, seed=state.seeds, position=state.lengths, step=i, sampling=sampling))
                tokens_by_step.append(drawn[-1].tokens)
                logits.append(q)
            ids = self._known_ids(tokens_by_step[-1][:, None], self.draft)
        all_q = torch.stack(logits, dim=1) if logits else None
        return DraftInputs(torch.stack(tokens_by_step, dim=1), all_q, drawn, sampling=sampling)

    def _verify(self, proposals: DraftInputs, p: Tensor, sampling: SamplingParams, state: State) -> Verdict:
        q, drawn = proposals.logits, proposals.drawn
        if q is not None and q.dtype != p.dtype:  # both get the same dtype, at least as precise as p's
            wide = torch.promote_types(p.dtype, q.dtype)
            p, q = p.to(wide), q.to(wide)
        cuts = [one.cut for one in drawn if one.cut is not None]
        ties = [one.tie for one in drawn if one.tie is not None]
        return verify(
            proposals.tokens,
            q,
            p,
            rule=self.rule,
            lenience=self.lenience,
            seed=state.seeds,
            position=state.lengths,
            sampling=sampling,
            lengths=proposals.lengths,
            draft_sampling=None if q is None else proposals.sampling,
            draft_lse=torch.stack([one.lse for one in drawn], dim=1) if drawn else None,
            draft_cut=(torch.stack(cuts, dim=1), torch.stack(ties, dim=1)) if cuts else None,
        )

    def _sample_as_target(
        self, logits: Tensor, position: Tensor, sampling: SamplingParams, state: State
    ) -> Verdict:
        """Sample from logits with the noise that the target uses at a position."""
        return verify(
            state.last[:, :0], None, logits[:, None], rule=self.rule, seed=state.seeds, position=position,
            sampling=sampling,
        )  # fmt: skip

    def _known_ids(self, ids: Tensor, model: Model) -> Tensor:
        """Replace tokens that a model with a smaller vocabulary does not know by its last token."""
        return ids if model.vocab_size >= self.target.vocab_size else ids.clamp(max=model.vocab_size - 1)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on the target's device."""
        return torch.cuda.device(self.target.device) if self.target.device.type == "cuda" else nullcontext()


def _next_power_of_two(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
