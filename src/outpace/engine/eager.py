"""The eager executor: any supported model, device and drafter, one operation after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.draft.base import Draft, Drafter, one_for_all
from outpace.engine.executor import Executor, Outcome, Pending, Prefilling
from outpace.engine.logprobs import adjusted_logits, store_logprobs, store_scores
from outpace.engine.sequence import SequenceState, seeds
from outpace.engine.stats import Clock
from outpace.models.scorer import Prefill, Scorer
from outpace.sampling import Prefix
from outpace.verification import Rule, Verdict, check, verify_block
from outpace.verification.block import Block


@dataclass(frozen=True)
class Done(Pending):
    """A step that has ended already."""

    outcome: Outcome

    def read(self) -> Outcome:
        """See ``Pending.read``."""
        return self.outcome


class EagerExecutor(Executor):
    """Executor that runs one operation after another. The drafter runs on the host, before the step.

    Args:
        scorer: The target.
        drafter: The drafter, or None.
        rule: The verification rule.
        lenience: Lenience of rule "token". Below 1, more draft tokens are accepted.
    """

    name, drafts, is_async = "eager", False, False

    def __init__(self, scorer: Scorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        self.scorer, self.rule, self.lenience = scorer, rule, lenience
        draft_scorer = None if drafter is None else drafter.scorer
        self.scorers = [scorer] if draft_scorer is None else [scorer, draft_scorer]

    def unsupported(self, rows: Sequence[SequenceState]) -> str | None:
        """See ``Executor.unsupported``; this executor supports all sequences."""
        return None

    def describe(self) -> str:
        """See ``Executor.describe``."""
        return "eager"

    def prepare(self, slots: int, tokens: int) -> None:
        """See ``Executor.prepare``."""
        for scorer in self.scorers:
            scorer.cache.prepare(slots, tokens)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[SequenceState], clock: Clock) -> Prefilling:
        """See ``Executor.prefill``."""
        slots, sources = [row.slot for row in rows], [row.source for row in rows]
        for scorer in self.scorers:
            scorer.encode_sources(slots, sources, max(len(row.tokens) for row in rows))
        clock.lap("encode")
        return EagerPrefilling(rows, Prefill(self.scorer, slots, [row.tokens for row in rows], sources), self)

    @torch.inference_mode()
    def start(self, rows: Mapping[int, SequenceState], g: int, draft: Draft | None, clock: Clock) -> Pending:
        """See ``Executor.start``; the step has ended when this returns."""
        self.scorer.check_placed()
        sequences = list(rows.values())
        draft = Draft.chosen([[] for _ in rows], self.scorer.device) if draft is None else draft
        last = on_device([row.tokens[-1] for row in sequences], torch.int64, self.scorer.device)
        scored = torch.cat((last[:, None], draft.tokens), dim=1)
        logits = self.scorer.score(list(rows), scored)  # [R, g+1, V] of p
        clock.lap("target")
        outcome = self.verdicts(sequences, draft, logits)
        clock.lap("verify")
        return Done(outcome)

    def verdicts(self, rows: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Outcome:
        """Return the outcome of verification, on the host."""
        verdict = self.verify(rows, draft, logits)
        both = torch.stack((verdict.accepted, verdict.next_token, verdict.bad.long()))
        accepted, next_token, bad = both.tolist()
        slots = [row.slot for row in rows]
        lengths = draft.lengths or [draft.tokens.shape[1]] * len(rows)
        drafts = [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), lengths, strict=True)]
        return Outcome(
            dict(zip(slots, drafts, strict=True)),
            dict(zip(slots, accepted, strict=True)),
            dict(zip(slots, next_token, strict=True)),
            dict(zip(slots, map(bool, bad), strict=True)),
        )

    def verify(self, rows: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Verdict:
        """Verify draft tokens, and store log-probabilities and scores where they were requested."""
        samplings = [row.sampling for row in rows]
        prefix = None
        if any(sampling.reads_prefix for sampling in samplings):
            prompts = [row.prompt_length for row in rows]
            prefix = Prefix.padded([row.tokens for row in rows], prompts, logits.device)
        if draft.logits is not None:
            # Both logits get the same dtype, at least as precise as the target's.
            dtype = torch.promote_types(logits.dtype, draft.logits.dtype)
            logits, draft = logits.to(dtype), replace(draft, logits=draft.logits.to(dtype))
        scores = None
        if any(row.top is not None or row.scores is not None for row in rows):
            scores = adjusted_logits(logits, samplings, prefix, draft)
        verdict = verify_block(
            self.block(rows, draft, logits),
            self.rule,
            self.lenience,
            one_for_all(samplings),
            None if draft.precomputed is None else draft.precomputed.sampling,
            prefix,
        )
        if any(row.scores is not None or row.logits is not None for row in rows):
            store_scores(rows, verdict, logits, scores)
        if scores is not None and any(row.top is not None for row in rows):
            store_logprobs(rows, draft, verdict, scores)
        return verdict

    def block(self, rows: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Block:
        """Return the input of verification."""
        R, g, device = len(rows), draft.tokens.shape[1], logits.device
        ragged = any(length < g for length in draft.lengths or ())
        lengths = on_device(list(draft.lengths or [0] * R), torch.int64, device) if ragged else None
        tokens, invalid = draft.tokens, None
        if lengths is not None:
            tokens = tokens.masked_fill(torch.arange(g, device=device) >= lengths[:, None], 0)
        if device.type != "cpu" and g:  # on the CPU, `check_draft` has checked the tokens
            tokens, invalid = check.tokens(tokens, None, logits.shape[-1])
        single = R == 1  # then seed and position are ints instead of tensors
        precomputed = draft.precomputed
        starts = [len(row.tokens) for row in rows]
        return Block(
            tokens,
            draft.logits,
            logits,
            None if precomputed is None else precomputed.lse,
            rows[0].seed if single else seeds(rows, device),
            starts[0] if single else on_device(starts, torch.int64, device),
            lengths,
            invalid,
            draft_cut=None if precomputed is None else precomputed.cut,
            draft_tie=None if precomputed is None else precomputed.tie,
            stop_at_rejection=True,
        )

    def commit(self, row: SequenceState, g: int, accepted: int) -> None:
        """See ``Executor.commit``."""
        self.scorer.cache.commit(row.slot, 1 + accepted)

    def release(self, row: SequenceState, keep: bool) -> None:
        """See ``Executor.release``."""
        self.scorer.reset([row.slot], [row.tokens] if keep else None)

    def detach(self) -> None:
        """See ``Executor.detach``; nothing is held beside the KV caches."""


class EagerPrefilling(Prefilling):
    """Prefill that ends with the first token of each sequence."""

    def __init__(self, rows: Sequence[SequenceState], prefill: Prefill, executor: EagerExecutor) -> None:
        super().__init__(rows, [prefill])
        self.executor = executor

    @torch.inference_mode()
    def advance(self) -> bool:
        """See ``Prefilling.advance``."""
        return super().advance()

    @torch.inference_mode()
    def finish(self, clock: Clock) -> Outcome | None:
        """See ``Prefilling.finish``."""
        logits = self.prefills[0].logits()
        clock.lap("target")
        draft = Draft.chosen([[] for _ in self.rows], logits.device)
        outcome = self.executor.verdicts(self.rows, draft, logits[:, None])
        clock.lap("verify")
        return outcome
