"""The graph executor: a whole decode step as one function of tensors, on CUDA as one graph.

Drafting, the target's forward pass, verification and commit run without the host. The host only starts steps,
and reads the small result of one step while the next one runs. All sequences of a step get the same number of
draft tokens, g. Verification ignores those beyond the number that a request has set. A graph serves the first
slots, up to a bucket size. Idle slots among them take part, and change nothing.

Sampling parameters, seeds and rules are tensors, so one graph serves any mix of sequences. Only what they
need (``Needs``) decides what a graph computes. Python processors run on the host, between a graph of drafting
and target pass and a graph of verification and commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.draft.base import Draft, Drafter, DraftTensors, GraphState
from outpace.engine.buckets import Buckets, StepKey, bucket_of
from outpace.engine.catch_up import CHUNK, CatchUp, known_tokens
from outpace.engine.executor import Executor, Pending, Prefilling
from outpace.engine.logprobs import Values, outcome_tokens
from outpace.engine.needs import Needs
from outpace.engine.pending import DeviceEvent, GraphPending, StepResult
from outpace.engine.processed import Processed, Scored
from outpace.engine.sequence import SequenceState
from outpace.engine.slots import Slots
from outpace.engine.stats import Clock
from outpace.models.capture import Graphs, announced
from outpace.models.paged import SLOTS
from outpace.models.prefill import PrefillGraphs
from outpace.models.scorer import Prefill, Scorer, WeightsMovedError
from outpace.policy import Load
from outpace.sampling.rows import RowSampling, warp_rows
from outpace.verification import Block, Rule, Verdict, edit_rows, start_kernels, verify_rows
from outpace.verification.rules import MATCH

# Draft tokens of steps compiled ahead. Kernels differ by power of two, and for multiples of 16 tokens.
COMPILED_G = 1, 2, 4, 5, 8, 15, 16
COMPILED_ROWS = 512  # tokens of all slots in such a step; more would need much memory for logits


class GraphExecutor(Executor):
    """Executor that runs a step as one graph.

    A step without draft tokens does not run the draft model. A later step with draft tokens first lets the
    draft model catch up.

    Args:
        scorer: The target.
        drafter: The drafter, or None.
        rule: The verification rule of sequences that do not have rule ``match``.
        lenience: Lenience of rule "token". Below 1, more draft tokens are accepted.
    """

    name = "graph"

    def __init__(self, scorer: Scorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        self.target, self.rule, self.lenience = scorer, rule, lenience
        self._drafter = drafter
        self.graphs = Graphs(scorer.device)
        self.reset()
        self.drafts = drafter is None or self.draft is not None

    @torch.inference_mode(False)
    def reset(self) -> None:
        self.graphs.clear()
        # Made anew, so that what the last one had on the device is freed
        self.draft = None if self._drafter is None else self._drafter.in_graph()
        if self._drafter is not None and self._drafter.reads_sources and self.target.has_encoder:
            self.draft = None
        self.draft_scorer = None if self.draft is None else self.draft.scorer
        self.scorers = [self.target] if self.draft_scorer is None else [self.target, self.draft_scorer]
        self._prefills, self._buckets = PrefillGraphs(self.graphs), Buckets(self.graphs)
        self._catch_up = None if self.draft_scorer is None else CatchUp(self.draft_scorer, self.graphs)
        self.slots = Slots(0, 0, self.target.vocab_size, self.target.device)
        self._versions: tuple[int, ...] = ()
        self._owners: dict[int, SequenceState] = {}  # by slot, the sequences whose state is on the device
        self._longest: dict[int, int] = {}  # by slot: most tokens after the steps in flight
        self._cut: set[int] = set()  # slots whose drafts ended early
        self._compiled_for: set[Needs] = set()

    # Capabilities

    @property
    def is_async(self) -> bool:  # type: ignore[override]
        return self.graphs.enabled

    def waits(self, sequences: Sequence[SequenceState]) -> bool:
        """See ``Executor.waits``; processors read the tokens of the last step."""
        return any(one.sampling.processors for one in sequences)

    def describe(self) -> str:
        kind = "one CUDA graph per step" if self.graphs.enabled else "without graphs"
        host = "" if self.drafts else f"; {type(self._drafter).__name__} drafts on the host"
        failures = self.graphs.failures
        steps = sorted({(key.slots, key.g) for key in self._buckets.steps() if key not in failures})
        captured = ", ".join(f"g={g} for {slots}" for slots, g in steps)
        failed = f"; {len(failures)} not captured: {next(iter(failures.values()))}" if failures else ""
        return f"{kind}{host}" + (f"; captured: {captured} slots" if captured else "") + failed

    def padded(self, sequences: int) -> int:
        return bucket_of(sequences) if self.graphs.enabled else sequences

    def load(self, sequences: Mapping[int, SequenceState], load: Load) -> Load:
        """See ``Executor.load``; all sequences are padded to the same number of tokens."""
        slots = self._buckets.slots(sequences)
        catch_up_tokens = load.catch_up_tokens
        if self.drafts:
            catch_up_tokens = (
                0 if self._catch_up is None else self._catch_up.chunks(sequences) * CHUNK * slots
            )
            if self.draft_scorer is not None:
                unique = dict.fromkeys(one.source for one in sequences.values())
                catch_up_tokens += sum(map(self.draft_scorer.num_unencoded, unique))
        return replace(
            load,
            batch=slots,
            catch_up_tokens=catch_up_tokens,
            captured=self._buckets.captured(slots, sequences.values()),
            executor=self.name,
            padded_drafts=self.drafts,
        )

    # Sequences

    def prepare(self, slots: int, tokens: int) -> None:
        for scorer in self.scorers:
            scorer.prepare(slots, min(tokens, scorer.context + 1))
        if slots > len(self.slots):
            slots = max(slots, SLOTS if self.graphs.enabled else 0)
            self.slots = self.slots.grown(slots, self.target.context + 1)
            self.graphs.clear()

    def prefill(self, sequences: Sequence[SequenceState], clock: Clock) -> Prefilling:
        """See ``Executor.prefill``; the last token of each prompt is left to the first step."""
        slots, prefills = [one.slot for one in sequences], []
        sources, longest = [one.source for one in sequences], max(len(one.tokens) for one in sequences)
        self.prepare(max(slots) + 1, longest)
        self.target.encode_sources(slots, sources, longest)
        clock.lap("encode")
        self._compile_ahead(max(slots) + 1, Needs.of(sequences, COMPILED_G[0]))
        for scorer in self.scorers:
            if scorer.has_encoder and scorer is not self.target:
                continue  # it encodes a source when it first drafts for it, which may be never
            prompts = [known_tokens(scorer, one.tokens) for one in sequences]
            append = partial(self._prefill_chunk, scorer)
            try:
                own = sources if scorer.has_encoder else ()
                prefills.append(Prefill(scorer, slots, prompts, own, leave_last=True, append=append))
            except WeightsMovedError:  # if those are the draft model's, the target goes on
                if scorer is self.target:
                    raise
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

    def commit(self, sequence: SequenceState, g: int, accepted: int) -> None:
        self.target.cache.commit(sequence.slot, 1 + accepted)
        self._longest[sequence.slot] -= g - accepted

    def release(self, sequence: SequenceState, keep: bool) -> None:
        slot = sequence.slot
        if self._owners.get(slot) is sequence:
            if self._catch_up is not None:
                self._catch_up.close(sequence)
            self.slots.end(slot)
            del self._owners[slot], self._longest[slot]
            if not self._owners:
                self._buckets = Buckets(self.graphs)
        for scorer in self.scorers:
            reusable = keep and (scorer is self.target or slot not in self._cut)
            scorer.reset([slot], [known_tokens(scorer, sequence.tokens)] if reusable else None)
        self._cut.discard(slot)

    # Steps

    @torch.inference_mode()
    def start(
        self,
        sequences: Mapping[int, SequenceState],
        g: int,
        draft: Draft | None,
        clock: Clock,
        limits: Mapping[int, int] | None = None,
    ) -> Pending:
        """See ``Executor.start``; on CUDA it does not wait for the step, unless there are processors."""
        for scorer in self.scorers if g else [self.target]:
            scorer.check_placed()
        self._attach(sequences.values())
        slots = self._buckets.use(sequences)
        self._reserve(sequences, g)
        needs = Needs.of(sequences.values(), g)
        with self._on_device():
            begun = started = DeviceEvent(self.target.device)
            catch_up_capture = 0.0
            if g:
                self._encode_for_draft(sequences.values())
            if g and self._catch_up is not None and self._catch_up.chunks(sequences):
                self._drop_stale_graphs(slots)
                catch_up_capture = self._catch_up.run(sequences, self.slots, slots)
                started = DeviceEvent(self.target.device)
            processed = Processed(sequences) if needs.processors else None
            limits = dict.fromkeys(sequences, g) if limits is None else limits
            result, capture = self._launch(g, slots, needs, draft, list(sequences), processed, limits)
            errors = None if processed is None else processed.errors
            pending = GraphPending(
                result, sequences, capture, begun, started, catch_up_capture, errors, self._cut, limits
            )
        if processed is not None:
            processed.rewind(pending.read())
        for slot in sequences:
            self._longest[slot] += g + 1
        if self._catch_up is not None and not g:
            self._catch_up.skip(sequences)
        return pending

    def _encode_for_draft(self, sequences: Iterable[SequenceState]) -> None:
        """Run the draft model's encoder for sequences that it drafts for the first time."""
        scorer = self.draft_scorer
        if scorer is None or not scorer.has_encoder:
            return
        new = [one for one in sequences if not scorer.has_source(one.slot)]
        if new:
            longest = max(len(one.tokens) for one in new)
            scorer.encode_sources([one.slot for one in new], [one.source for one in new], longest)

    def _launch(
        self,
        g: int,
        slots: int,
        needs: Needs,
        draft: Draft | None = None,
        drafted: Sequence[int] = (),
        change: Callable[[Scored], None] | None = None,
        limits: Mapping[int, int] | None = None,
    ) -> tuple[StepResult, float]:
        """Run a step of the first slots as a graph.

        Args:
            g: Number of draft tokens per sequence.
            slots: Number of slots that take part, idle ones included.
            needs: What the step computes.
            draft: Draft tokens of the host, for the slots ``drafted``.
            drafted: Slots of those draft tokens.
            change: Changes the target's logits before verification, on the host. The step is then two graphs.
            limits: As in ``start``. None: no slot has a sequence.

        Returns:
            The result, and the seconds of captures.
        """
        if needs.edits and self.slots.edits is None:
            self.slots.add_edits()
        self._drop_stale_graphs(slots)
        buffers = None if draft is None or not g else self.slots.copy_draft(g, draft, drafted, slots)
        host_buffers = None if buffers is None else id(buffers)
        key = StepKey(g, slots, self._buckets.serving(needs, g, slots, host_buffers), host_buffers)
        if key.needs.limits:  # a captured step may have limits that these sequences do not need
            self.slots.limit(limits or {}, slots)
        name = f"a step with {g} draft tokens and {slots} slots"
        changed = [self.slots.lengths, *([] if self.slots.edits is None else [self.slots.edits.seen])]
        if change is None:
            return self.graphs.run(key, lambda: self.step(key, buffers), name, changed)
        scored, seconds = self.graphs.run(
            (key, "score"), lambda: self.score(key, buffers), f"{name}, first half"
        )
        change(scored)
        if (key, "score") in self.graphs.failures:  # there is no memory that a second graph could read
            return self.decide(key, scored), seconds
        result, more = self.graphs.run((key, scored), lambda: self.decide(key, scored), name, changed)
        return result, seconds + more

    @torch.inference_mode()
    def _compile_ahead(self, slots: int, needs: Needs) -> None:
        """Compile the kernels of a prefill and of steps, all at the same time.

        One after another, compilation would take several times as long. Kernels that are compiled already
        take next to no time.
        """
        if not self.target.has_kernels or needs in self._compiled_for:
            return
        from outpace.verification.kernels.ahead import compiling_ahead

        start_kernels().join()
        self._compiled_for.add(needs)
        if needs.edits and self.slots.edits is None:
            self.slots.add_edits()
        device = self.target.device
        without = replace(needs, match=True, rule=False, limits=False)  # of a step without draft tokens
        with self._on_device(), announced("compiling kernels"), compiling_ahead(device):
            if self._catch_up is not None:
                self._catch_up.scorer.launch_once(slots, CHUNK)
            counts = [g for g in COMPILED_G if slots * (g + 1) <= COMPILED_ROWS] or [COMPILED_G[0]]
            with_draft = [StepKey(g, slots, needs, None) for g in counts if self._drafter is not None]
            for key in (*with_draft, StepKey(0, slots, without, None)):
                draft = None if self.draft is None else self.draft.launch_once(self.state(key), key.g)
                if key.g and not self.drafts:
                    nothing = Draft(torch.zeros(0, key.g, dtype=torch.int64))
                    draft = self.slots.copy_draft(key.g, nothing, [], slots)
                draft = draft or DraftTensors(self.slots.token_ids[:slots, : key.g])
                raw = self.target.launch_once(slots, draft.tokens.shape[1] + 1)
                if raw is not None:
                    self.verify(key, self.scored(key, draft, raw))

    @torch.inference_mode()
    def warm_up(self, g: int, slots: int, needs: Needs) -> None:
        self.prepare(bucket_of(slots), 1)
        with self._on_device():
            self._launch(g if self.draft is not None else 0, bucket_of(slots), needs)
            if g and self._catch_up is not None:
                self._catch_up.run_chunk(self.slots, bucket_of(slots))

    def _drop_stale_graphs(self, slots: int) -> None:
        """Discard the graphs if memory that they read has moved."""
        self.prepare(slots, 1)
        for scorer in self.scorers:
            scorer.arrange(slots)
        versions = tuple(scorer.version for scorer in self.scorers)
        if versions != self._versions:
            self.graphs.clear()
            self._versions = versions

    def _reserve(self, sequences: Mapping[int, SequenceState], g: int) -> None:
        """Reserve KV cache for the tokens that a step may write."""
        ends = []
        for slot, sequence in sequences.items():
            # A step in flight may pass the end of its sequence. Such tokens are dropped.
            last = min(sequence.prompt_length + sequence.max_new_tokens, self.target.context)
            ends.append(min(self._longest[slot], last) + g + 1)
        for scorer in self.scorers:
            scorer.cache.reserve(list(sequences), [min(end, scorer.context + 1) for end in ends])

    @torch.inference_mode()
    def step(self, key: StepKey, host_draft: DraftTensors | None = None) -> StepResult:
        """Run one step of the first slots: draft, target forward pass, verification, commit.

        Args:
            key: The size of the step, and what it computes.
            host_draft: Draft tokens from the host. None: drafting is part of the step.
        """
        return self.decide(key, self.score(key, host_draft))

    @torch.inference_mode()
    def score(self, key: StepKey, host_draft: DraftTensors | None = None) -> Scored:
        """Draft tokens, and run the target over them."""
        state = self.state(key)
        draft = self.propose(state, key.g) if host_draft is None else host_draft
        ids = torch.cat((state.last[:, 1:], draft.tokens), dim=1)
        return self.scored(key, draft, self.target.forward(ids, state.positions[:, 1:]))

    def scored(self, key: StepKey, draft: DraftTensors, raw: Tensor) -> Scored:
        """Return the target's logits ``[B, g+1, V]``, in the form that ``decide`` takes."""
        logits = raw.to(torch.float32, copy=True) if key.needs.processors else raw
        if key.needs.limits and key.host_buffers is None:  # the host has limited its own draft tokens
            limits = self.slots.limits[: key.slots]
            lengths = limits if draft.lengths is None else draft.lengths.minimum(limits)
            draft = replace(draft, lengths=lengths)
        return Scored(draft, raw, logits)

    @torch.inference_mode()
    def decide(self, key: StepKey, scored: Scored) -> StepResult:
        """Verify draft tokens, and commit the new tokens to the state of the slots."""
        verdict, p = self.verify(key, scored)
        draft, g = scored.draft, key.g
        new = outcome_tokens(draft.tokens, verdict)  # [B, g+1]
        # Tokens past a sequence's end are overwritten later, or belong to an idle slot.
        lengths, token_ids = self.slots.lengths[: key.slots], self.slots.token_ids[: key.slots]
        offsets = torch.arange(g + 1, device=new.device)
        token_ids.scatter_(1, (lengths[:, None] + offsets).clamp(max=token_ids.shape[1] - 1), new)
        # A sequence without a next token ends, so its state is not used again.
        active = self.slots.active[: key.slots]
        if key.needs.edits and self.slots.edits is not None:
            counted = (offsets <= verdict.accepted[:, None]) & active.bool()[:, None]
            self.slots.edits.first(key.slots).count(new, counted)
        lengths.add_((verdict.accepted + 1) * active)
        drafted = torch.full_like(verdict.accepted, g) if draft.lengths is None else draft.lengths
        counts = torch.stack((verdict.accepted, verdict.next_token, verdict.bad.long(), drafted), dim=1)
        values, top, stored = Values(), key.needs.top, key.needs.values
        if stored or top is not None:
            scores = warp_rows(p, self._sampling(key).before_argmax)
            values = Values.of(scores, scored.raw, new, top, stored)
        return StepResult(torch.cat((counts, draft.tokens), dim=1), values)

    def _sampling(self, key: StepKey) -> RowSampling:
        """Return temperature and filters of the target."""
        return RowSampling(self.slots.shape[: key.slots], key.needs.filters)

    def state(self, key: StepKey) -> GraphState:
        """Return the state of the first slots, as drafting reads it."""
        slots, needs = key.slots, key.needs
        # A step in flight may have passed the end of its sequence, whose tokens are dropped.
        lengths = self.slots.lengths[:slots].clamp(max=self.slots.token_ids.shape[1])
        positions = lengths[:, None] + torch.arange(-2, key.g, device=lengths.device)
        # Positions past the context belong to draft tokens that no token remains for.
        positions = positions.clamp(0, self.target.context)
        positions = positions.where(self.slots.active[:slots, None].bool(), -1)
        both = needs.match and needs.rule
        edits = self.slots.draft_edits
        return GraphState(
            lengths,
            self.slots.seeds[:slots],
            self.slots.token_ids[:slots],
            positions,
            RowSampling(self.slots.draft_shape[:slots], needs.filters),
            edits.first(slots) if edits is not None and needs.edits else None,
            self.slots.match[:slots].bool() if both else needs.match,
            self.target.vocab_size,
        )

    def propose(self, state: GraphState, g: int) -> DraftTensors:
        """Propose g draft tokens for each sequence; none without a drafter that runs inside the graph."""
        if self.draft is None or g == 0:
            return DraftTensors(state.token_ids[:, :0])
        return self.draft.propose(state, g)

    def verify(self, key: StepKey, scored: Scored) -> tuple[Verdict, Tensor]:
        """Verify draft tokens; return the verdict, and the logits after ``Edits``."""
        slots, needs, draft = key.slots, key.needs, scored.draft
        p, q, drawn = scored.logits, draft.logits, draft.drawn
        if needs.edits and self.slots.edits is not None:
            p = edit_rows(p, self.slots.edits.first(slots), draft.tokens)
        if q is not None and q.dtype != p.dtype:  # both get the same dtype, at least as precise as p's
            wide = torch.promote_types(p.dtype, q.dtype)
            p, q = p.to(wide), q.to(wide)
        cuts = [one.cut for one in drawn if one.cut is not None]
        ties = [one.tie for one in drawn if one.tie is not None]
        sampling, verdicts = self._sampling(key), list[Verdict]()
        block = Block(
            draft.tokens,
            q,
            p,
            torch.stack([one.lse for one in drawn], dim=1) if drawn else None,
            self.slots.seeds[:slots],
            self.slots.lengths[:slots],
            draft.lengths,
            draft_cut=torch.stack(cuts, dim=1) if cuts else None,
            draft_tie=torch.stack(ties, dim=1) if ties else None,
        )
        if needs.match:
            own = replace(block, draft_logits=None, draft_lse=None, draft_cut=None, draft_tie=None)
            verdicts.append(verify_rows(own, MATCH, 1.0, sampling, None))
        if needs.rule:
            verdicts.append(verify_rows(block, self.rule, self.lenience, sampling, draft.sampling))
        if len(verdicts) == 1:
            return verdicts[0], p
        return verdicts[0].in_rows(self.slots.match[:slots].bool(), verdicts[1]), p

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on the target's device."""
        return torch.cuda.device(self.target.device) if self.target.device.type == "cuda" else nullcontext()
