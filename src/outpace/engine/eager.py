"""The eager executor: any supported model, device and drafter, one operation after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.checks.arguments import on_device, to_device
from outpace.draft.base import Draft, Drafter, one_for_all
from outpace.engine.executor import Executor, Outcome, Pending, Prefilling
from outpace.engine.logprobs import Values, before_argmax, outcome_tokens
from outpace.engine.sequence import SequenceState, seeds
from outpace.engine.stats import Clock
from outpace.models.scorer import Prefill, Scorer
from outpace.sampling import Errors, Prefix, process, warp
from outpace.verification import Rule, Verdict, check, verify_block
from outpace.verification.block import Block
from outpace.verification.rules import MATCH


@dataclass(frozen=True)
class Done(Pending):
    """A step that has ended already."""

    outcome: Outcome

    def read(self) -> Outcome:
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

    def describe(self) -> str:
        return "eager"

    def prepare(self, slots: int, tokens: int) -> None:
        for scorer in self.scorers:
            scorer.cache.prepare(slots, tokens)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[SequenceState], clock: Clock) -> Prefilling:
        slots, sources = [one.slot for one in sequences], [one.source for one in sequences]
        # The draft model encodes a source when it first drafts for it, which may be never
        self.scorer.encode_sources(slots, sources, max(len(one.tokens) for one in sequences))
        clock.lap("encode")
        return EagerPrefilling(
            sequences, Prefill(self.scorer, slots, [one.tokens for one in sequences], sources), self
        )

    @torch.inference_mode()
    def start(
        self,
        sequences: Mapping[int, SequenceState],
        g: int,
        draft: Draft | None,
        clock: Clock,
        limits: Mapping[int, int] | None = None,
    ) -> Pending:
        """See ``Executor.start``; the step has ended when this returns."""
        self.scorer.check_placed()
        ordered = list(sequences.values())
        draft = Draft.chosen([[] for _ in sequences]) if draft is None else draft
        draft = replace(draft, tokens=to_device(draft.tokens, self.scorer.device))
        last = on_device([one.tokens[-1] for one in ordered], torch.int64, self.scorer.device)
        scored = torch.cat((last[:, None], draft.tokens), dim=1)
        logits = self.scorer.score(list(sequences), scored)  # [R, g+1, V] of p
        clock.lap("target")
        outcome = self.verdicts(ordered, draft, logits)
        clock.lap("verify")
        return Done(outcome)

    def verdicts(self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Outcome:
        """Return the outcome of verification, on the host."""
        errors: Errors = {}
        verdict = self.verify(sequences, draft, logits, errors)
        both = torch.stack((verdict.accepted, verdict.next_token, verdict.bad.long()))
        accepted, next_token, bad = both.tolist()
        slots = [one.slot for one in sequences]
        lengths = draft.lengths or [draft.tokens.shape[1]] * len(sequences)
        drafts = [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), lengths, strict=True)]
        return Outcome(
            dict(zip(slots, drafts, strict=True)),
            dict(zip(slots, accepted, strict=True)),
            dict(zip(slots, next_token, strict=True)),
            dict(zip(slots, map(bool, bad), strict=True)),
        ).with_errors({slots[i]: error for i, error in errors.items()})

    def verify(
        self,
        sequences: Sequence[SequenceState],
        draft: Draft,
        logits: Tensor,
        errors: Errors | None = None,
    ) -> Verdict:
        """Verify draft tokens, and store log-probabilities, scores and logits where they were requested.

        Args:
            sequences: The sequences.
            draft: Their draft tokens.
            logits: Logits ``[R, g+1, V]`` of the target.
            errors: Gets the errors of processors, by row.
        """
        samplings = one_for_all([one.sampling for one in sequences])
        prefix = None
        if any(sampling.reads_prefix for sampling in samplings):
            prompts = [one.prompt_length for one in sequences]
            prefix = Prefix.padded([one.tokens for one in sequences], prompts, logits.device)
        scored = on_device([length + 1 for length in draft.lengths or []], torch.int64, logits.device)
        p, rewind = logits, None
        if any(one.edits for one in samplings):
            p, rewind = process(
                logits, samplings, prefix, draft.tokens, scored if draft.lengths else None,
                until_rejected=True, errors=errors,
            )  # fmt: skip
        if draft.logits is not None:
            # Both logits get the same dtype, at least as precise as the target's.
            dtype = torch.promote_types(p.dtype, draft.logits.dtype)
            p, draft = p.to(dtype), replace(draft, logits=draft.logits.to(dtype))
        shapes = [one.shape for one in samplings]
        block, match = self.block(sequences, draft, p), [one.match for one in sequences]
        unapplied = None if draft.precomputed is None else draft.precomputed.sampling
        verdicts = []
        if any(match):
            own = replace(block, draft_logits=None, draft_lse=None, draft_cut=None, draft_tie=None)
            verdicts.append(verify_block(own, MATCH, 1.0, shapes))
        if not all(match):
            verdicts.append(verify_block(block, self.rule, self.lenience, shapes, unapplied))
        verdict = verdicts[0]
        if len(verdicts) > 1:
            verdict = verdict.in_rows(on_device(match, torch.bool, logits.device), verdicts[1])
        if rewind is not None:
            rewind(torch.tensor(num_new_tokens(verdict)) - 1)
        top = max((one.top for one in sequences if one.top is not None), default=None)
        stored = any(one.scores is not None or one.logits is not None for one in sequences)
        if stored or top is not None:
            scores, tokens = warp(p, before_argmax(shapes)), outcome_tokens(draft.tokens, verdict)
            values = Values.of(scores, logits, tokens, top, stored).with_logprobs_on("cpu")
            for row, (one, count) in enumerate(zip(sequences, num_new_tokens(verdict), strict=True)):
                values.store(one, count, row)
        return verdict

    def block(self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Block:
        """Return the input of verification."""
        R, g, device = len(sequences), draft.tokens.shape[1], logits.device
        ragged = any(length < g for length in draft.lengths or ())
        lengths = on_device(list(draft.lengths or [0] * R), torch.int64, device) if ragged else None
        tokens, invalid = draft.tokens, None
        if lengths is not None:
            tokens = tokens.masked_fill(torch.arange(g, device=device) >= lengths[:, None], 0)
        if device.type != "cpu" and g:  # on the CPU, `check_draft` has checked the tokens
            tokens, invalid = check.tokens(tokens, None, logits.shape[-1])
        single = R == 1  # then seed and position are ints instead of tensors
        precomputed = draft.precomputed
        starts = [len(one.tokens) for one in sequences]
        return Block(
            tokens,
            draft.logits,
            logits,
            None if precomputed is None else precomputed.lse,
            sequences[0].seed if single else seeds(sequences, device),
            starts[0] if single else on_device(starts, torch.int64, device),
            lengths,
            invalid,
            draft_cut=None if precomputed is None else precomputed.cut,
            draft_tie=None if precomputed is None else precomputed.tie,
        )

    def commit(self, sequence: SequenceState, g: int, accepted: int) -> None:
        self.scorer.cache.commit(sequence.slot, 1 + accepted)

    def release(self, sequence: SequenceState, keep: bool) -> None:
        self.scorer.reset([sequence.slot], [sequence.tokens] if keep else None)


def num_new_tokens(verdict: Verdict) -> list[int]:
    """Return the number of new tokens of each row."""
    counts: list[int] = (verdict.accepted + ~verdict.bad).tolist()
    return counts


class EagerPrefilling(Prefilling):
    """Prefill that ends with the first token of each sequence."""

    def __init__(self, sequences: Sequence[SequenceState], prefill: Prefill, executor: EagerExecutor) -> None:
        super().__init__(sequences, [prefill])
        self.executor = executor

    @torch.inference_mode()
    def finish(self, clock: Clock) -> Outcome | None:
        logits = self.prefills[0].logits()
        clock.lap("target")
        draft = Draft.chosen([[] for _ in self.sequences], logits.device)
        outcome = self.executor.verdicts(self.sequences, draft, logits[:, None])
        clock.lap("verify")
        return outcome
