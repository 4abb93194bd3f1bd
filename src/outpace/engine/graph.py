"""The graph executor: a whole decode step as one function of tensors, on CUDA as one graph.

Drafting, the target's forward pass, verification and commit run without the host. The host only starts steps,
and reads the small result of one step while the next one runs. All sequences of a step have the same number
of draft tokens, g. A graph serves the first slots, up to a bucket size. Idle slots among them take part, and
change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.draft.base import Draft, Drafter, DraftTensors, GraphState, fit
from outpace.engine.buckets import Buckets, StepKey, bucket_of
from outpace.engine.capture import Graphs, announced
from outpace.engine.catch_up import CHUNK, CatchUp, known_tokens
from outpace.engine.executor import Executor, Pending, Prefilling
from outpace.engine.pending import DeviceEvent, GraphPending
from outpace.engine.prefill import PrefillGraphs
from outpace.engine.sequence import SequenceState
from outpace.engine.slots import Slots
from outpace.engine.stats import Clock
from outpace.models.paged import SLOTS
from outpace.models.scorer import Prefill, Scorer
from outpace.policy import Load
from outpace.sampling import SamplingParams
from outpace.verification import Rule, Verdict, sample, start_kernels, verify

COMPILED_G = 5  # draft tokens of steps that are compiled ahead; most others have the same kernels
BLOCK_TOKENS = 128  # tokens of KV cache that are reserved ahead at a time


class GraphExecutor(Executor):
    """Executor that runs a step as one graph, for any number of sequences with equal sampling parameters.

    A step without draft tokens does not run the draft model. A later step with draft tokens first lets the
    draft model catch up.

    Args:
        scorer: The target.
        drafter: The drafter, or None.
        rule: The verification rule.
        lenience: Lenience of rule "token". Below 1, more draft tokens are accepted.
    """

    name = "graph"

    def __init__(self, scorer: Scorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        self.target, self.rule, self.lenience = scorer, rule, lenience
        self.draft = None if drafter is None else drafter.in_graph()
        self.drafts = drafter is None or self.draft is not None
        self.draft_scorer = None if self.draft is None else self.draft.scorer
        self.scorers = [scorer] if self.draft_scorer is None else [scorer, self.draft_scorer]
        self._drafter_name = type(drafter).__name__
        self.graphs = Graphs(scorer.device)
        self.reset()

    @torch.inference_mode(False)
    def reset(self) -> None:
        """See ``Executor.reset``."""
        self.graphs.clear()
        self._prefills, self._buckets = PrefillGraphs(self.graphs), Buckets(self.graphs)
        self._catch_up = None if self.draft_scorer is None else CatchUp(self.draft_scorer, self.graphs)
        self.slots = Slots(0, 0, self.target.device)
        self._versions: tuple[int, ...] = ()
        self._owners: dict[int, SequenceState] = {}  # by slot, the sequences whose state is on the device
        self._longest: dict[int, int] = {}  # by slot: most tokens after the steps in flight
        self._reserved: dict[int, int] = {}  # by slot: tokens that the KV caches have memory for
        self._compiled_for: set[SamplingParams] = set()

    # Capabilities

    @property
    def is_async(self) -> bool:  # type: ignore[override]
        """See ``Executor.is_async``."""
        return self.graphs.enabled

    def unsupported(self, sequences: Sequence[SequenceState]) -> str | None:
        """See ``Executor.unsupported``."""
        first = sequences[0].sampling
        for sequence in sequences:
            if sequence.sampling != first or (sequence.draft_sampling or first) != first:
                return "sequences have different sampling parameters"
            if sequence.sampling.logit_bias or sequence.sampling.reads_prefix:
                return "sampling has penalties, a logit bias or processors"
            if sequence.top is not None or sequence.scores is not None or sequence.logits is not None:
                return "logprobs, scores or logits were requested"
        return None

    def describe(self) -> str:
        """See ``Executor.describe``."""
        kind = "one CUDA graph per step" if self.graphs.enabled else "without graphs"
        host = "" if self.drafts else f"; {self._drafter_name} drafts on the host"
        failures = self.graphs.failures
        steps = sorted({(key.slots, key.g) for key in self._buckets.steps() if key not in failures})
        captured = ", ".join(f"g={g} for {slots}" for slots, g in steps)
        failed = f"; {len(failures)} not captured: {next(iter(failures.values()))}" if failures else ""
        return f"{kind}{host}" + (f"; captured: {captured} slots" if captured else "") + failed

    def padded(self, sequences: int) -> int:
        """See ``Executor.padded``."""
        return bucket_of(sequences) if self.graphs.enabled else sequences

    def load(self, sequences: Mapping[int, SequenceState], load: Load) -> Load:
        """See ``Executor.load``; all sequences are padded to the same number of tokens."""
        slots, sampling = self._buckets.slots(sequences), next(iter(sequences.values())).sampling
        catch_up_tokens = load.catch_up_tokens
        if self.drafts:
            catch_up_tokens = (
                0 if self._catch_up is None else self._catch_up.chunks(sequences) * CHUNK * slots
            )
        return replace(
            load,
            batch=slots,
            catch_up_tokens=catch_up_tokens,
            captured=self._buckets.captured(slots, sampling),
            executor=self.name,
            padded_drafts=self.drafts,
        )

    # Sequences

    def prepare(self, slots: int, tokens: int) -> None:
        """See ``Executor.prepare``."""
        for scorer in self.scorers:
            scorer.cache.prepare(slots, min(tokens, scorer.context + 1))
        if slots > len(self.slots):
            slots = max(slots, SLOTS if self.graphs.enabled else 0)
            self.slots = self.slots.grown(slots, self.target.context + 1)
            self.graphs.clear()

    def prefill(self, sequences: Sequence[SequenceState], clock: Clock) -> Prefilling:
        """See ``Executor.prefill``; the last token of each prompt is left to the first step."""
        slots, prefills = [one.slot for one in sequences], []
        longest, sampling = max(len(one.tokens) for one in sequences), sequences[0].sampling
        self.prepare(max(slots) + 1, longest)
        if self.target.has_kernels and sampling not in self._compiled_for:
            self._compiled_for.add(sampling)
            self._compile_ahead(max(slots) + 1, sampling)
        for scorer in self.scorers:
            prompts = [known_tokens(scorer, one.tokens) for one in sequences]
            append = partial(self._prefill_chunk, scorer)
            prefills.append(Prefill(scorer, slots, prompts, leave_last=True, append=append))
        return Prefilling(sequences, prefills)

    def _prefill_chunk(
        self, scorer: Scorer, slots: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor | None:
        self._drop_stale_graphs(max(slots) + 1)
        with self._on_device():
            return self._prefills.append(scorer, slots, tokens)

    def _attach(self, sequences: Iterable[SequenceState]) -> None:
        """Write the state of sequences to the device, unless it is there."""
        new = [one for one in sequences if self._owners.get(one.slot) is not one]
        if not new:
            return
        self.prepare(max(one.slot for one in new) + 1, max(len(one.tokens) for one in new))
        if self._catch_up is not None:
            for sequence in new:
                self._catch_up.open(sequence)
        self.slots.start(new)
        for sequence in new:  # only now, so that a failure above leaves no sequence half attached
            self._owners[sequence.slot], self._longest[sequence.slot] = sequence, len(sequence.tokens)
            self._reserved[sequence.slot] = 0

    def commit(self, sequence: SequenceState, g: int, accepted: int) -> None:
        """See ``Executor.commit``."""
        self.target.cache.commit(sequence.slot, 1 + accepted)
        self._longest[sequence.slot] -= g - accepted

    def release(self, sequence: SequenceState, keep: bool) -> None:
        """See ``Executor.release``."""
        if self._owners.get(sequence.slot) is sequence:
            self._forget(sequence)
        for scorer in self.scorers:
            scorer.reset([sequence.slot], [known_tokens(scorer, sequence.tokens)] if keep else None)

    def _forget(self, sequence: SequenceState) -> None:
        """Give up a sequence, whose state is then only in the KV caches."""
        if self._catch_up is not None:
            self._catch_up.close(sequence)
        self.slots.end(sequence.slot)
        for by_slot in (self._owners, self._longest, self._reserved):
            by_slot.pop(sequence.slot)
        if not self._owners:
            self._buckets = Buckets(self.graphs)

    def detach(self) -> None:
        """See ``Executor.detach``."""
        for sequence in list(self._owners.values()):
            self._forget(sequence)

    # Steps

    @torch.inference_mode()
    def start(
        self, sequences: Mapping[int, SequenceState], g: int, draft: Draft | None, clock: Clock
    ) -> Pending:
        """See ``Executor.start``; on CUDA it does not wait for the step."""
        for scorer in self.scorers if g else [self.target]:
            scorer.check_placed()
        self._attach(sequences.values())
        slots = self._buckets.use(sequences)
        self._reserve(sequences, g)
        sampling = next(iter(sequences.values())).sampling
        with self._on_device():
            begun = started = DeviceEvent(self.target.device)
            catch_up_capture = 0.0
            if g and self._catch_up is not None and self._catch_up.chunks(sequences):
                self._drop_stale_graphs(slots)
                catch_up_capture = self._catch_up.run(sequences, self.slots, slots)
                started = DeviceEvent(self.target.device)
            pending = self._launch(g, sampling, slots, draft, list(sequences))
        for slot in sequences:
            self._longest[slot] += g + 1
        if self._catch_up is not None and not g:
            self._catch_up.skip(sequences)
        return GraphPending(*pending, begun, started, catch_up_capture)

    def _launch(
        self,
        g: int,
        sampling: SamplingParams,
        slots: int,
        draft: Draft | None = None,
        drafted: Sequence[int] = (),
    ) -> tuple[Tensor, float]:
        """Run a step of the first slots as a graph; draft tokens of the host are for the slots ``drafted``.

        Returns:
            The result, in the format that ``GraphPending`` reads, and the seconds of a capture.
        """
        self._drop_stale_graphs(slots)
        buffers = None if draft is None or not g else self.slots.copy_draft(g, draft, drafted)
        key = StepKey(g, slots, sampling, None if buffers is None else id(buffers))
        return self.graphs.run(
            key,
            lambda: self.step(g, sampling, slots, buffers),
            f"a step with {g} draft tokens and {slots} slots",
            (self.slots.lengths,),
        )

    @torch.inference_mode()
    def _compile_ahead(self, slots: int, sampling: SamplingParams) -> None:
        """Compile the kernels of a prefill and of steps, all at the same time.

        One after another, compilation would take several times as long. Kernels that are compiled already
        take next to no time.
        """
        from outpace.verification.kernels.ahead import compiling_ahead

        start_kernels().join()
        g = 0 if self.draft is None else COMPILED_G
        state = self.state(g, sampling, slots)
        with self._on_device(), announced("compiling kernels"), compiling_ahead(state.lengths.device):
            p = self.target.launch_once(slots, g + 1)
            draft = DraftTensors(state.token_ids[:, :g])
            if self.draft_scorer is not None:
                self.draft_scorer.launch_once(slots, 1)
                q = self.draft_scorer.launch_once(slots, 2)
                if q is not None and not state.own_noise:
                    q = fit(q[:, -1], self.target.vocab_size)
                    drawn = [sample(q, seed=state.seeds, position=state.lengths, sampling=sampling)] * g
                    draft = DraftTensors(draft.tokens, torch.stack([q] * g, 1), drawn, sampling=sampling)
            if p is not None:
                self.verify(draft, p, state)

    @torch.inference_mode()
    def warm_up(self, g: int, slots: int, sampling: SamplingParams) -> None:
        """See ``Executor.warm_up``."""
        self.prepare(bucket_of(slots), 1)
        with self._on_device():
            self._launch(g if self.draft is not None else 0, sampling, bucket_of(slots))
            if g and self._catch_up is not None:
                self._catch_up.run_chunk(self.slots, bucket_of(slots))

    def _drop_stale_graphs(self, slots: int) -> None:
        """Discard the graphs if memory that they read has moved."""
        self.prepare(slots, 1)
        for scorer in self.scorers:
            scorer.arrange(slots)
        versions = tuple(scorer.cache.version for scorer in self.scorers)
        if versions != self._versions:
            self.graphs.clear()
            self._versions = versions

    def _reserve(self, sequences: Mapping[int, SequenceState], g: int) -> None:
        """Reserve KV cache for the tokens that a step may write."""
        needed: dict[int, int] = {}
        for slot, sequence in sequences.items():
            if self._longest[slot] + g + 1 > self._reserved[slot]:
                # A step in flight may pass the end of its sequence. Such tokens are dropped.
                last = min(sequence.prompt_length + sequence.max_new_tokens, self.target.context)
                needed[slot] = min(self._longest[slot] + g + 1 + BLOCK_TOKENS, last + g + 1)
        if needed:
            for scorer in self.scorers:
                most = scorer.context + 1
                scorer.cache.reserve(list(needed), [min(length, most) for length in needed.values()])
            self._reserved |= needed

    @torch.inference_mode()
    def step(
        self, g: int, sampling: SamplingParams, slots: int, host_draft: DraftTensors | None = None
    ) -> Tensor:
        """Run one step of the first slots: draft g tokens, target forward pass, verification, commit.

        Args:
            g: Number of draft tokens per sequence.
            sampling: Sampling parameters of all sequences.
            slots: Number of slots that take part, idle ones included.
            host_draft: Draft tokens from the host. None: drafting is part of the step.

        Returns:
            The outcome, in the format that ``GraphPending`` reads.
        """
        state = self.state(g, sampling, slots)
        draft = self.propose(state, g) if host_draft is None else host_draft.first(slots)
        scored = torch.cat((state.last[:, 1:], draft.tokens), dim=1)  # [B, g+1]
        p = self.target.forward(scored, state.positions[:, 1:])  # [B, g+1, V]
        verdict = self.verify(draft, p, state)
        # Commit. Tokens past a sequence's end are overwritten later, or belong to an idle slot.
        new = torch.cat((draft.tokens, verdict.next_token[:, None]), dim=1)
        new = new.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
        at = state.lengths[:, None] + torch.arange(g + 1, device=p.device)
        state.token_ids.scatter_(1, at.clamp(max=state.token_ids.shape[1] - 1), new)
        state.lengths.add_((verdict.accepted + 1) * self.slots.active[:slots])
        drafted = torch.full_like(verdict.accepted, g) if draft.lengths is None else draft.lengths
        counts = torch.stack((verdict.accepted, verdict.next_token, verdict.bad.long(), drafted), dim=1)
        return torch.cat((counts, draft.tokens), dim=1)

    def state(self, g: int, sampling: SamplingParams, slots: int) -> GraphState:
        """Return the state of the first slots, as a step with g draft tokens reads it."""
        lengths = self.slots.lengths[:slots]
        positions = lengths[:, None] + torch.arange(-2, g, device=lengths.device)
        # Positions past the context belong to draft tokens that no token remains for.
        positions = positions.clamp(0, self.target.context)
        positions = positions.where(self.slots.active[:slots, None].bool(), -1)
        return GraphState(
            lengths,
            self.slots.seeds[:slots],
            self.slots.token_ids[:slots],
            positions,
            sampling,
            self.rule.name == "match",
            self.target.vocab_size,
        )

    def propose(self, state: GraphState, g: int) -> DraftTensors:
        """Propose g draft tokens for each sequence; none without a drafter that runs inside the graph."""
        if self.draft is None or g == 0:
            return DraftTensors(state.token_ids[:, :0])
        return self.draft.propose(state, g)

    def verify(self, draft: DraftTensors, p: Tensor, state: GraphState) -> Verdict:
        """Verify draft tokens."""
        q, drawn = draft.logits, draft.drawn
        if q is not None and q.dtype != p.dtype:  # both get the same dtype, at least as precise as p's
            wide = torch.promote_types(p.dtype, q.dtype)
            p, q = p.to(wide), q.to(wide)
        cuts = [one.cut for one in drawn if one.cut is not None]
        ties = [one.tie for one in drawn if one.tie is not None]
        return verify(
            draft.tokens,
            q,
            p,
            rule=self.rule,
            lenience=self.lenience,
            seed=state.seeds,
            position=state.lengths,
            sampling=state.sampling,
            lengths=draft.lengths,
            draft_sampling=None if q is None else draft.sampling,
            draft_lse=torch.stack([one.lse for one in drawn], dim=1) if drawn else None,
            draft_cut=(torch.stack(cuts, dim=1), torch.stack(ties, dim=1)) if cuts else None,
        )

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on the target's device."""
        return torch.cuda.device(self.target.device) if self.target.device.type == "cuda" else nullcontext()
