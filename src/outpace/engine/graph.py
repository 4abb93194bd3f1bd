"""The graph executor: a whole decode step as one function of tensors, on CUDA as one graph.

Drafting, the target's forward pass, verification and the update of every sequence run without the host. The
host only starts steps, and reads the small result of one while the next one runs. So all sequences advance
together with the same g. The slot of a sequence whose end the host has seen stands still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outpace.draft.base import fit
from outpace.draft.lookup import copied
from outpace.engine.capture import Graphs
from outpace.engine.inputs import DraftInputs, HostDraft
from outpace.engine.pending import Moment, Pending
from outpace.models.causal import WORTH_COPYING, common, most_shared
from outpace.sampling import SamplingParams
from outpace.verification import Drawn, Rule, Verdict, sample, verify
from outpace.verification.rules import parse

CHUNK = 512  # tokens of a prompt per forward pass
TOGETHER = 4096  # tokens of several prompts per forward pass
SHORTEST = 32  # tokens; the smallest piece of a prompt that has a graph
PADDING = 2  # times their own tokens that prompts may take, padded, to be prefilled together


class Model(Protocol):
    """A model of the graph executor: ``fused.FusedModel``, or ``generic.GenericModel`` for any other."""

    vocab_size: int
    device: torch.device

    def room(self, rows: int, tokens: int) -> Any:
        """Return a KV cache for ``rows`` sequences of at most ``tokens`` tokens.

        It has ``part(i, n, T)``, a view of n rows from row i on with at most T tokens. ``copy(i, j, n)``
        copies the first n tokens of row i to row j. ``wipe()`` fills it with zeros.
        """

    def read(self, ids: Tensor, positions: Tensor, cache: Any) -> None:
        """Write tokens ``[B, n]`` at positions ``[B, n]`` to the first B rows of the KV cache."""

    def logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Do what ``read`` does, and return the logits ``[B, n, V]`` after each token."""


@dataclass(frozen=True)
class State:
    """State of the sequences that take part in a step: views of the engine's tensors."""

    lengths: Tensor
    seeds: Tensor
    active: Tensor
    last: Tensor  # [rows, 2], the last two tokens
    text: Tensor  # [rows, tokens], prompt and output; [rows, 0] without prompt lookup

    @classmethod
    def of(cls, engine: Engine, rows: int) -> State:
        """Return views of an engine's first rows."""
        all_rows = engine.lengths, engine.seeds, engine.active, engine.last, engine.text
        return cls(*(one[:rows] for one in all_rows))


class Iteration(NamedTuple):
    """The key of a step's graph.

    Attributes:
        g: Draft tokens per sequence.
        rows: Slots that take part.
        sampling: Sampling parameters of all sequences.
        given: The id of the buffers for draft tokens from outside. None if the engine drafts.
    """

    g: int
    rows: int
    sampling: SamplingParams
    given: int | None


class Engine:
    """Slots in which a target and a draft decode sequences together.

    After steps without draft tokens, ``catch_up`` must run before the draft model drafts again.

    Args:
        target: The target model.
        draft: The draft model, or None.
        rows: The number of slots.
        tokens: The most tokens of a sequence.
        rule: As in ``Decoder``.
        lenience: As in ``Decoder``.
        copies: Prompt lookup instead of a draft model: the least and the most last tokens that must match.
            Without ``copies`` and ``draft`` the engine decodes without speculation.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        rows: int,
        tokens: int,
        *,
        rule: Rule | str = "token",
        lenience: float = 1.0,
        copies: tuple[int, int] | None = None,
    ) -> None:
        self.target, self.draft, self.copies = target, draft, copies
        self.rows, self.tokens = rows, tokens
        self.rule, self.lenience = parse(rule), lenience
        self.target_cache = target.room(rows, tokens)
        self.draft_cache: Any = None if draft is None else draft.room(rows, tokens)
        integers = torch.zeros(3, rows, dtype=torch.int64, device=target.device)
        self.lengths, self.seeds, self.active = integers[0], integers[1], integers[2]
        self.last = torch.zeros_like(integers[:2]).T.contiguous()  # [rows, 2], the last two tokens
        self.text = torch.zeros(rows, tokens if copies else 0, dtype=torch.int64, device=target.device)
        self.graphs = Graphs(target.device)
        self._ready: dict[tuple[int, SamplingParams, bool], frozenset[int]] = {}
        self._ready_since = 0
        self._pages: dict[int, tuple[Tensor, Tensor]] = {}  # by size: tokens and positions that graphs read
        self._held: dict[int, Sequence[int]] = {}  # by slot: first tokens that its KV caches surely hold
        self._given: dict[
            tuple[int, SamplingParams | None, torch.dtype | None], DraftInputs
        ] = {}  # buffers that graphs read

    def begin(self, row: int, text: Sequence[int], seed: int) -> None:
        """Prefill a sequence in a slot.

        Its last token is fed by the first step.
        """
        self.begin_all(row, [text], [seed])

    @torch.inference_mode()
    def begin_all(self, row: int, texts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Prefill sequences in consecutive slots, from slot ``row`` on."""
        for text in texts:
            if not 1 <= len(text) < self.tokens:
                raise ValueError(f"text: got {len(text)} tokens; there is room for 1 to {self.tokens - 1}")
        with self._on_device():
            longest = max(map(len, texts))
            alike = longest > WORTH_COPYING and len(set(map(tuple, texts))) < len(texts)
            if (
                len(texts) > 1
                and not alike
                and all(most_shared(self._held, text)[0] is None for text in texts)
                and len(texts) * longest <= PADDING * sum(map(len, texts))
            ):
                self._read(row, texts, 0)
            else:
                for i, text in enumerate(texts, row):
                    self._read(i, [text], self._taken_over(i, text))
        for i, (text, seed) in enumerate(zip(texts, seeds, strict=True), row):
            ids = torch.tensor(text, device=self.target.device)
            if self.copies is not None:
                self.text[i, : len(text)] = ids
            self.lengths[i] = len(text)
            self.last[i] = ids[[-2, -1]] if len(text) > 1 else ids[[-1, -1]]
            self.seeds[i] = seed
            self.active[i] = 1

    def _read(self, row: int, texts: Sequence[Sequence[int]], done: int) -> None:
        """Prefill sequences without their last tokens, from token ``done`` on.

        Where a sequence is shorter than others its KV cache gets garbage, which lies past its length.
        """
        for i in range(row, row + len(texts)):
            self._held.pop(i, None)  # in case this is interrupted
        longest = max(map(len, texts)) - 1
        ids = torch.tensor([[*text, *[text[-1]] * (longest + 1 - len(text))] for text in texts])
        ids = ids.to(self.target.device)
        step = max(1, min(CHUNK, TOGETHER // len(texts)))
        for first in range(done, longest, step):
            self._read_some(row, ids[:, first : min(first + step, longest)], first, step)
        self._held |= {i: text[:-1] for i, text in enumerate(texts, row)}

    def _read_some(self, row: int, ids: Tensor, first: int, most: int) -> None:
        """Run tokens ``[B, n]`` at positions from ``first`` on through the models.

        There are graphs for a few sizes, and only if all slots take part: otherwise there would be too many.
        """
        B, n = ids.shape
        whole = self.graphs.on and self.rows == B
        size = min(most, max(SHORTEST, _power(n))) if whole else n
        seen = min(_power(max(first + size, CHUNK)), self.tokens)  # positions that these tokens attend to
        places = torch.arange(first, first + size, device=ids.device).clamp(max=seen - 1).expand(B, -1)
        if whole:
            if size not in self._pages:
                self._pages[size] = ids.new_zeros(B, size), ids.new_zeros(B, size)
            page = self._pages[size]
            page[0][:, :n], page[0][:, n:] = ids, ids[:, -1:]  # garbage in the second, past the ends
            page[1].copy_(places)
            ids, places = page

        def read() -> Tensor:
            for model, cache in self._scorers():
                model.read(self._known(ids, model), places, cache.part(row, B, seen))
            return ids

        if whole:
            self.graphs.run((size, seen), read, f"a prompt's piece of {size} tokens")
        else:
            read()

    def _scorers(self) -> list[tuple[Model, Any]]:
        """Return the models, each with its KV cache."""
        draft = [] if self.draft is None else [(self.draft, self.draft_cache)]
        return [(self.target, self.target_cache), *draft]

    def _taken_over(self, row: int, text: Sequence[int]) -> int:
        """Return how many of a text's first tokens a slot's KV caches hold.

        Some of them may first be copied from another slot.
        """
        own = common(self._held.get(row, ()), text, len(text) - 1)
        best, shared = most_shared(self._held, text)
        if best is None or shared < own + WORTH_COPYING:
            return own
        self._held.pop(row, None)  # in case this is interrupted
        for _, cache in self._scorers():
            cache.copy(best, row, shared)
        return shared

    @torch.inference_mode()
    def end(self, row: int, text: Sequence[int] = (), wipe: bool = False) -> None:
        """Stop a slot until another sequence starts in it.

        A sequence that starts with the text of this one reuses its KV cache. NaN in a KV cache would remain,
        unless ``wipe`` is set.

        Args:
            row: The slot.
            text: The tokens that the KV caches hold, for reuse.
            wipe: Fill the slot's KV caches with zeros.
        """
        self.active[row] = 0
        if text:  # the draft's KV cache may lack the last token but one
            self._held[row] = text[:-2]
        if wipe:
            self._held.pop(row, None)
            for _, cache in self._scorers():
                cache.part(row, 1, self.tokens).wipe()

    def forget(self) -> None:
        """Reuse nothing that the KV caches hold."""
        self._held.clear()

    @property
    def piece(self) -> int:
        """Tokens per sequence that ``catch_up`` reads at a time; one graph serves all pieces."""
        return min(SHORTEST, self.tokens)

    def pieces(self, missing: int) -> int:
        """Return the number of pieces that ``catch_up`` reads for ``missing`` tokens."""
        return -(-missing // self.piece)

    @torch.inference_mode()
    def catch_up(self, texts: Mapping[int, Sequence[int]], missing: int, rows: int | None = None) -> float:
        """Run the draft model over tokens that were generated without it.

        The very last two tokens are left out, since every step feeds them. No step may be under way.

        Args:
            texts: The tokens of sequences, by slot.
            missing: The most tokens that the draft model lacks in a sequence.
            rows: The number of first slots that take part. By default all.

        Returns:
            The seconds that captures took.
        """
        if self.draft is None:
            return 0.0
        draft, cache = self.draft, self.draft_cache
        seen = min(_power(max(*map(len, texts.values()), CHUNK)), self.tokens)
        size = self.piece
        rows = self.rows if rows is None else rows
        for row in range(rows):
            if row not in texts:
                self._held.pop(row, None)  # its KV cache is overwritten
        if size not in self._pages:
            self._pages[size] = self.last.new_zeros(self.rows, size), self.last.new_zeros(self.rows, size)
        tokens, positions = (one[:rows] for one in self._pages[size])

        def read() -> Tensor:
            draft.read(self._known(tokens, draft), positions, cache.part(0, rows, seen))
            return tokens

        making = 0.0
        for left in range(self.pieces(missing), 0, -1):
            # Sequences that lack fewer tokens read some again, which changes nothing. Short ones also read
            # garbage past their ends.
            firsts = [len(texts.get(row, ())) - 2 - left * size for row in range(rows)]
            places = [[max(0, first) + i for i in range(size)] for first in firsts]
            ids = [
                [texts[row][place] if row in texts and place < len(texts[row]) else 0 for place in some]
                for row, some in enumerate(places)
            ]
            tokens.copy_(torch.tensor(ids))
            positions.copy_(torch.tensor(places))
            with self._on_device():
                key = "catch up", rows, seen
                making += self.graphs.run(key, read, f"catching up with {size} tokens")[1]
        return making

    @torch.inference_mode()
    def start(
        self, g: int, sampling: SamplingParams, rows: int | None = None, given: HostDraft | None = None
    ) -> Pending:
        """Start a step and return at once.

        Args:
            g: Draft tokens per sequence. 0 decodes without speculation, as does an engine that cannot draft.
            sampling: Sampling parameters of all sequences.
            rows: The number of first slots that take part. By default all.
            given: Draft tokens from outside, g per sequence, instead of the engine's own.

        Returns:
            The step, whose outcome can be read later.

        Raises:
            ValueError: The sampling needs the host between draft tokens, or there are not as many slots.
        """
        if sampling.logit_bias or sampling.reads_prefix:
            raise ValueError(
                "sampling: has penalties, bias or processors, which need the host between drafts"
            )
        rows = self.rows if rows is None else rows
        if not 1 <= rows <= self.rows:
            raise ValueError(f"rows: got {rows}; there are 1 to {self.rows}")
        if self.draft is None and self.copies is None and given is None:
            g = 0
        with self._on_device():
            proposals = None if given is None else self._put(g, given)
            key = Iteration(g, rows, sampling, None if proposals is None else id(proposals))
            begun = Moment(self.target.device)
            result, making = self.graphs.run(
                key,
                lambda: self.iteration(g, sampling, rows, proposals),
                f"an iteration of g = {g}, {rows} rows,",
                (self.lengths, self.last),
            )
            return Pending(result, begun, making)

    @property
    def goes_on(self) -> bool:
        """True if a started step runs while the host does something else."""
        return self.graphs.on

    def ready(self, sampling: SamplingParams, rows: int, given: bool) -> frozenset[int] | None:
        """Return the draft lengths that need no capture; None if none ever does.

        Args:
            sampling: Sampling parameters of all sequences.
            rows: Slots that take part.
            given: Whether the draft tokens come from outside.
        """
        if not self.graphs.on:
            return None
        if self._ready_since != self.graphs.changes:
            self._ready, self._ready_since = {}, self.graphs.changes
        key = rows, sampling, given
        if key not in self._ready:
            made = (one for one in self.graphs if isinstance(one, Iteration))
            self._ready[key] = frozenset(
                one.g for one in made if (one.rows, one.sampling, one.given is not None) == key
            )
        return self._ready[key]

    def _put(self, g: int, given: HostDraft) -> DraftInputs:
        """Copy draft tokens from outside to the buffers that graphs read.

        Slots without draft tokens draft none.
        """
        draft = given.draft
        key = g, given.sampling, None if draft.logits is None else draft.logits.dtype
        if key not in self._given:
            logits = None
            if draft.logits is not None:
                logits = draft.logits.new_zeros(self.rows, g, self.target.vocab_size)
            tokens = self.last.new_zeros(self.rows, g)
            self._given[key] = DraftInputs(tokens, logits, (), tokens.new_zeros(self.rows), given.sampling)
        room = self._given[key]
        assert room.lengths is not None
        lengths = torch.zeros(self.rows, dtype=torch.int64)
        lengths[list(given.slots)] = torch.tensor(draft.lengths or [g] * len(given.slots))
        room.lengths.copy_(lengths)
        room.tokens[list(given.slots)] = draft.tokens.to(room.tokens.device)
        if room.logits is not None and draft.logits is not None:
            room.logits[list(given.slots)] = draft.logits
        return room

    @torch.inference_mode()
    def iteration(
        self, g: int, sampling: SamplingParams, rows: int, given: DraftInputs | None = None
    ) -> Tensor:
        """Run one step: one forward pass of the target over g draft tokens.

        Returns:
            The outcome, in the format that ``Pending`` reads.
        """
        state = State.of(self, rows)
        # Positions of the last two tokens and the draft tokens. Idle slots may write at the cache's end.
        places = (state.lengths[:, None] + torch.arange(-2, g, device=state.last.device)).clamp(
            0, self.tokens - 1
        )
        proposals = self._propose(g, sampling, state, places) if given is None else given.first(rows)
        scored = torch.cat((state.last[:, 1:], proposals.tokens), dim=1)  # [rows, g+1]
        p = self.target.logits(scored, places[:, 1:], self.target_cache)  # [rows, g+1, V]
        verdict = self._verify(proposals, p, sampling, state)
        if self.copies is not None:
            at = (state.lengths[:, None] + torch.arange(g + 1, device=p.device)).clamp(max=self.tokens - 1)
            new = torch.cat((proposals.tokens, verdict.next_token[:, None]), dim=1)
            state.text.scatter_(1, at, new.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None]))
        kept = scored.gather(1, verdict.accepted[:, None])  # the token before the next one
        moved = state.active[:, None].bool()
        state.last.copy_(
            torch.where(moved, torch.cat((kept, verdict.next_token[:, None]), dim=1), state.last)
        )
        state.lengths.add_((verdict.accepted + 1) * state.active)
        drafted = torch.full_like(verdict.accepted, g) if proposals.lengths is None else proposals.lengths
        each = torch.stack((verdict.accepted, verdict.next_token, verdict.bad.long(), drafted), dim=1)
        return torch.cat((each, proposals.tokens), dim=1)

    def _propose(self, g: int, sampling: SamplingParams, state: State, places: Tensor) -> DraftInputs:
        """Propose g draft tokens for each sequence.

        The draft's KV cache may lack the last token but one, which is fed again.
        """
        if self.copies is not None and g:
            tokens, lengths = copied(state.text, state.lengths, g, *self.copies)
            return DraftInputs(tokens, lengths=lengths)
        if self.draft is None or g == 0:
            return DraftInputs(state.last[:, :0])
        ids = self._known(state.last, self.draft)
        drafts, logits, drawn = [], [], list[Drawn]()
        for i in range(g):
            at = places[:, :2] if i == 0 else places[:, i + 1 : i + 2]
            q = fit(self.draft.logits(ids, at, self.draft_cache)[:, -1], self.target.vocab_size)
            if self.rule.name == "match":
                # With the target's own noise the draft model is likelier to sample the target's token.
                drafts.append(self._plain(q, state.lengths + i, sampling, state).next_token)
            else:
                drawn.append(sample(q, seed=state.seeds, position=state.lengths, step=i, sampling=sampling))
                drafts.append(drawn[-1].tokens)
                logits.append(q)
            ids = self._known(drafts[-1][:, None], self.draft)
        all_q = torch.stack(logits, dim=1) if logits else None
        return DraftInputs(torch.stack(drafts, dim=1), all_q, drawn, sampling=sampling)

    def _verify(self, proposals: DraftInputs, p: Tensor, sampling: SamplingParams, state: State) -> Verdict:
        q, drawn = proposals.logits, proposals.drawn
        if q is not None and q.dtype != p.dtype:  # both get one precision, never less than the target's
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

    def _plain(self, logits: Tensor, position: Tensor, sampling: SamplingParams, state: State) -> Verdict:
        return verify(
            state.last[:, :0], None, logits[:, None], rule=self.rule, seed=state.seeds, position=position,
            sampling=sampling,
        )  # fmt: skip

    def _known(self, ids: Tensor, model: Model) -> Tensor:
        """Replace tokens that a model with a smaller vocabulary does not know by its last token."""
        return ids if model.vocab_size >= self.target.vocab_size else ids.clamp(max=model.vocab_size - 1)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the target's device the current one, on which kernels are launched."""
        return torch.cuda.device(self.target.device) if self.target.device.type == "cuda" else nullcontext()


def _power(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
