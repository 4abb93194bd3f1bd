"""The ``Decoder`` class and the decode step of the eager executor.

This is the only module where drafters, policies, models and verification meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
import warnings
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from outpace.checks.arguments import boolean, integer, kind, on_device, suggests
from outpace.checks.errors import suggestion
from outpace.draft.base import Draft, Drafter, one_for_all
from outpace.draft.model import ModelDrafter
from outpace.draft.resolve import resolve_drafter
from outpace.draft.text import TextDrafter
from outpace.engine import graph_run
from outpace.engine.claims import claim, release
from outpace.engine.commit import advance
from outpace.engine.drafting import Proposer, seeds
from outpace.engine.engines import Engines
from outpace.engine.logprobs import adjusted_logits, store_logprobs, store_scores
from outpace.engine.request import Arrays, Options, Prompt, Prompts, Reader
from outpace.engine.sequence import Output, SequenceState, Step
from outpace.engine.stats import Clock
from outpace.models.causal import CausalScorer
from outpace.models.seq2seq import Seq2SeqScorer, scorer_of
from outpace.policy import DraftLengthPolicy, Fixed, Goodput
from outpace.sampling import Prefix, SamplingParams
from outpace.verification import Rule, Verdict, check, verify_block
from outpace.verification.block import Block
from outpace.verification.rules import parse

WithModel = ModelDrafter | TextDrafter
MAX_DRAFT_TOKENS = 16  # per step, by default
# Attributes and methods of a draft-length policy


class Decoder:
    """Speculative decoding of a target model, by default with exactly the target's distribution.

    A decoder runs one call at a time. A second call from another thread, or while a stream is unfinished,
    raises ``RuntimeError``.

    Args:
        target: A causal model of the Transformers library, an encoder-decoder model (T5, mT5, BART, Marian,
            Whisper), or a scorer of one. The prompts of an encoder-decoder model are its encoder's input.
        draft: A ``Drafter``, a smaller model with the same tokenizer, or "lookup". None decodes without
            speculation.
        tokenizer: The target's tokenizer, for text prompts, text output and stop strings.
        rule: "token", "block", "match" or ``sigmoid(alpha, beta)``. The last one is not exact. See
            docs/design/verification.md.
        lenience: For rule "token". A value below 1 accepts more draft tokens and is not exact.
        num_draft_tokens: The draft-length policy: an int for ``Fixed``, ``Heuristic(start)``, or
            ``Goodput()``, which is "auto", the default. ``Goodput`` decides by measured time. It is designed
            never to be slower than decoding without speculation. See docs/guides/draft-length.md.
        draft_sampling: The drafter's sampling parameters. By default they are the target's.
        pack: On a CPU, keep a second copy of the weights. It makes forward passes over few tokens faster.
        engine: True uses the graph executor where models and sampling parameters allow it. On CUDA it runs a
            step as one CUDA graph. ``describe`` says whether the models allow it. The default is True on
            CUDA, and False on other devices.

    Attributes:
        drafter: A ``Drafter``, or None. The draft model of a ``ModelDrafter`` or ``TextDrafter`` is
            ``drafter.scorer.model``.
    """

    @suggests
    def __init__(
        self,
        target: Any,
        draft: Drafter | torch.nn.Module | str | None = None,
        tokenizer: Any = None,
        *,
        rule: Rule | str = "token",
        lenience: float = 1.0,
        num_draft_tokens: DraftLengthPolicy | int | str | None = None,
        draft_sampling: SamplingParams | None = None,
        pack: bool = False,
        engine: bool | None = None,
    ) -> None:
        if isinstance(target, str | os.PathLike):
            raise TypeError(f"target: got {kind(target)[:80]}; it must be a model; outpace.load takes a name")
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise TypeError(
                f"tokenizer: got {kind(tokenizer)[:80]}; it must be the target's tokenizer, such as "
                "AutoTokenizer.from_pretrained(name)"
            )
        boolean("pack", pack)
        if engine is not None:
            boolean("engine", engine)
        self.scorer = scorer_of(target)
        self.drafter = resolve_drafter(draft)
        self._check_encoders()
        self.rule = parse(rule)
        check.lenience(lenience, self.rule)
        self.lenience = lenience
        if num_draft_tokens in (None, "auto"):
            num_draft_tokens = (
                Fixed(0) if draft is None else Goodput(min(MAX_DRAFT_TOKENS, self.scorer.context - 1))
            )
        self.policy: DraftLengthPolicy = policy_of(num_draft_tokens)
        if self.policy.max_draft_tokens >= self.scorer.context:
            raise ValueError(
                f"num_draft_tokens: got {self.policy!r}, up to {self.policy.max_draft_tokens} draft tokens; "
                f"it must be less than the target's context of {self.scorer.context} tokens"
            )
        if not isinstance(draft_sampling, SamplingParams | None):
            raise TypeError(f"draft_sampling: got {kind(draft_sampling)}; it must be a SamplingParams")
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.check(self.scorer.vocab_size, tokenizer)
        elif isinstance(self.drafter, TextDrafter):
            self.drafter.check(self.scorer, tokenizer)
        if pack:
            self.scorer.pack()
            if isinstance(self.drafter, WithModel):
                self.drafter.scorer.pack()
        if engine is None:
            engine = self.scorer.device.type == "cuda"
        self.engines = Engines(self.scorer, self.drafter, self.rule, self.lenience) if engine else None
        self.reader = Reader(self.scorer, tokenizer, draft_sampling)

    @property
    def target(self) -> Any:
        """The Transformers model, as the caller passed it."""
        return self.scorer.model

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None without one."""
        return self.reader.tokenizer

    @overload
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Output: ...

    @overload
    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, n: int, **options: Unpack[Options]
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompt: Arrays,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Any: ...

    def generate(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Output | list[Output]:
        """Generate from a prompt, or from a list of prompts as one ragged batch.

        A single prompt that fails raises its error. In a list, a prompt that fails or cannot be read gets
        ``finish_reason`` "error" and its ``error``. A warning names its index, and the other prompts go on.

        Args:
            prompt: A string, messages (``[{"role": "user", "content": "Hello"}]``), token ids, a tokenizer's
                encoding or a ``Source``; or a list of prompts. Messages go through the chat template. A
                tensor, an array or an encoding is one prompt if it is ``[n]`` or ``[1, n]``, and B prompts if
                it is ``[B, n]``. An encoding's ``attention_mask`` removes padding.
            sampling: A ``SamplingParams``, or one per prompt. Without it, its fields can be passed by name:
                ``temperature=0.8, top_p=0.95``. With neither, the target's ``generation_config`` decides, as
                in Transformers.
            n: Samples per prompt. They are adjacent in the output list. The prompt is prefilled once.
            **options: The keyword arguments below, and the fields of ``SamplingParams``.

        Keyword Args:
            max_new_tokens: The most new tokens per sequence. The default is the ``generation_config``'s, or
                256.
            stop: A string, or a list of strings, that end a sequence. They are not part of its text.
            stop_tokens: Token ids that end a sequence, in addition to the model's end-of-text.
            ignore_eos: Continue after end-of-text.
            seed: An int, or one per prompt. None takes a fresh seed. Equal seeds and prompts give equal texts
                if decoding is greedy, with rule "match", or with a policy that does not depend on measured
                time.
            logprobs: True returns log-probabilities. An int k also returns those of the k likeliest tokens.
            scores: True returns the logits of every new token after the sampling parameters were applied.
            logits: True returns the target's own logits of every new token.
            stop_when: A function called with the ``SequenceState`` after each new token. If it returns True,
                the sequence ends there.
            batch_size: The most sequences at a time. A waiting sequence takes the slot of one that has ended.

        Returns:
            An ``Output`` for a single prompt, or a list of n with ``n=``. A list of ``Output`` for a list of
            prompts.
        """
        rows, single = self.reader.rows(prompt, sampling, n, **options)
        outputs: dict[int, Output] = {}
        for step in self._steps(rows, options.get("batch_size")):
            if step.output is not None:
                outputs[step.index] = step.output
        for row, output in outputs.items():
            if output.error is not None:
                if single:
                    raise output.error
                reason = str(output.error).removeprefix("prompt: ")
                warnings.warn(f"prompt {row // (n or 1)}: {reason}", stacklevel=2)
        return outputs[0] if single and n is None else [outputs[i] for i in range(len(rows))]

    def stream(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Generator[Step]:
        """Yield one ``Step`` per decode step and sequence as it happens.

        The arguments are those of ``generate``. The last step of a sequence carries its ``Output``.
        """
        rows, single = self.reader.rows(prompt, sampling, n, **options)

        def steps() -> Generator[Step]:
            with contextlib.closing(self._steps(rows, options.get("batch_size"))) as run:
                for step in run:
                    if single and step.output is not None and step.output.error is not None:
                        raise step.output.error
                    yield step

        return steps()

    def _steps(self, rows: list[SequenceState], batch_size: int | None) -> Generator[Step]:
        """Yield one step for each prompt that could not be read, then the steps of the others."""
        yield from (row.failed_step() for row in rows if row.error is not None)
        readable = [row for row in rows if row.error is None]
        if readable:
            yield from self._run(readable, batch_size)

    def forget(self) -> None:
        """Discard cached keys and values of earlier prompts, and pack the weights again.

        Changed weights are noticed without this call, unless they were changed through ``.data``.
        """
        self.scorer.forget()
        self.scorer.repack()
        if self.engines is not None:
            self.engines.forget()
        if isinstance(self.drafter, WithModel):
            self.drafter.forget()

    @overload
    def encode(self, prompt: Prompt) -> list[int]: ...

    @overload
    def encode(self, prompt: Prompts) -> list[list[int]]: ...

    @overload
    def encode(self, prompt: Arrays) -> Any: ...

    def encode(self, prompt: Prompt | Arrays | Prompts) -> list[int] | list[list[int]]:
        """Return the token ids of a prompt that ``generate`` takes, or of each prompt of a list."""
        return self.reader.encode(prompt)

    def describe(self) -> str:
        """Return a readable summary of target, drafter, rule, draft-length policy and engine."""
        drafter = "none, without speculation" if self.drafter is None else type(self.drafter).__name__
        if isinstance(self.drafter, WithModel):
            drafter = self.drafter.describe()
        parts = {
            "target": self.scorer.describe(),
            "drafter": drafter,
            "rule": f"{self.rule}" + (f", lenience {self.lenience}" if self.lenience < 1 else ""),
            "num_draft_tokens": f"{self.policy!r}",
        }
        if self.engines is not None:
            parts["engine"] = self.engines.describe()
        return "\n".join(f"{name:<16}  {value}" for name, value in parts.items())

    # The decode step

    @torch.inference_mode()
    def _step(self, rows: list[SequenceState]) -> list[Step]:
        """Run one decode step: draft, target forward pass, verification, commit.

        With g draft tokens, each sequence gains 1 to g + 1 tokens.
        """
        clock = Clock()
        slots = [row.slot for row in rows]
        proposal = self._proposer.propose(rows, self._proposer.load(rows))
        draft, state = proposal.draft, proposal.state  # tokens [R, g] from q
        clock.lap("draft")
        last = on_device([row.tokens[-1] for row in rows], torch.int64, self.scorer.device)
        logits = self.scorer.score(slots, torch.cat((last[:, None], draft.tokens), dim=1))  # [R, g+1, V] of p
        clock.lap("target")
        verdict = self._verify(rows, draft, logits)
        outcome = torch.stack((verdict.accepted, verdict.next_token, verdict.bad)).cpu()
        accepted, next_token, bad = outcome.tolist()
        clock.lap("verify")
        self.scorer.commit(slots, [1 + count for count in accepted])
        if state is not None and self.drafter is not None:
            self.drafter.commit(outcome[0], outcome[1])
        steps = advance(rows, draft, state, (accepted, next_token, bad), self.scorer.context)
        phases = clock.share([row.stats for row in rows])
        self.policy.observe(proposal.outcome(rows, accepted, next_token, phases))
        return [replace(step, phases=phases) for step in steps]

    @torch.inference_mode()
    def _prefill(self, rows: list[SequenceState]) -> list[Step]:
        """Prefill the prompts and sample each sequence's first token.

        ``Stats`` counts this as a step without draft tokens.
        """
        clock = Clock()
        sources = [row.source for row in rows]
        for scorer in self.encoders():
            longest = max(len(row.tokens) for row in rows)
            scorer.cache_sources(
                [row.slot for row in rows], [one for one in sources if one is not None], longest
            )
        clock.lap("encode")
        logits = self.scorer.prefill([row.slot for row in rows], [row.tokens for row in rows], sources)
        clock.lap("target")
        draft = Draft.chosen([[] for _ in rows], logits.device)
        verdict = self._verify(rows, draft, logits[:, None])
        clock.lap("verify")
        _, next_token, bad = torch.stack((verdict.accepted, verdict.next_token, verdict.bad)).tolist()
        steps = advance(rows, draft, None, ([0] * len(rows), next_token, bad), self.scorer.context)
        phases = clock.share([row.stats for row in rows])
        return [replace(step, phases=phases) for step in steps]

    def _verify(self, rows: list[SequenceState], draft: Draft, logits: Tensor) -> Verdict:
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
            self._block(rows, draft, logits),
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

    def _block(self, rows: list[SequenceState], draft: Draft, logits: Tensor) -> Block:
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
        return Block(
            tokens,
            draft.logits,
            logits,
            None if precomputed is None else precomputed.lse,
            rows[0].seed if single else seeds(rows, device),
            len(rows[0].tokens)
            if single
            else on_device([len(row.tokens) for row in rows], torch.int64, device),
            lengths,
            invalid,
            draft_cut=None if precomputed is None else precomputed.cut,
            draft_tie=None if precomputed is None else precomputed.tie,
            stop_at_rejection=True,
        )

    def _scorers(self) -> list[CausalScorer]:
        """Return the target's scorer, and the scorer of the draft model if there is one."""
        return [self.scorer, *([self.drafter.scorer] if isinstance(self.drafter, WithModel) else [])]

    def encoders(self) -> list[Seq2SeqScorer]:
        """Return those scorers of target and draft model that have an encoder."""
        return [scorer for scorer in self._scorers() if isinstance(scorer, Seq2SeqScorer)]

    def _check_encoders(self) -> None:
        """Share the encoder if target and draft model have the same one; reject models that do not fit.

        A draft model with an encoder needs a target with an encoder, which has an input for it.
        """
        if isinstance(self.drafter, WithModel) and self.drafter.scorer is self.scorer:
            raise ValueError(
                "draft: got a drafter with the target's own scorer; it must have a scorer of its own, "
                "because each scorer has one KV cache; pass the draft model itself"
            )
        encoders = self.encoders()
        if len(encoders) == 2:
            encoders[1].share_encoder(encoders[0])
        elif encoders and encoders[0] is not self.scorer:
            raise ValueError(
                "draft: got an encoder-decoder model; it must be a decoder-only model, as the target is"
            )

    # Sequences start and end

    def _run(self, rows: list[SequenceState], batch_size: int | None) -> Generator[Step]:
        """Decode all sequences to their ends, at most ``batch_size`` at a time."""
        owner = object()
        waiting, active = deque(rows), list[SequenceState]()
        caches_valid = False  # whether the KV caches agree with the sequences' tokens
        try:
            self._claim(owner)
            self._proposer = Proposer(self.scorer, self.drafter, self.policy, self.rule)
            slots = min(batch_size or len(rows), len(rows))
            longest = max(min(row.prompt_length + row.max_new_tokens, self.scorer.context) for row in rows)
            if self.engines is not None:
                engine = self.engines.engine_for(
                    rows, slots, longest + 2 * (self.policy.max_draft_tokens + 1)
                )
                if engine is not None:
                    if isinstance(self.drafter, TextDrafter):
                        self.drafter.reserve(slots, longest + self.policy.max_draft_tokens + 1)
                    drafts_in_graph, sampling = self.engines.drafts_in_graph, waiting[0].sampling
                    run = graph_run.GraphRun(engine, self._proposer, slots, drafts_in_graph, sampling)
                    yield from run.steps(waiting)
                    return
            self.scorer.reserve(slots, longest + self.policy.max_draft_tokens + 1)
            if isinstance(self.drafter, WithModel):
                self.drafter.reserve(slots, longest + self.policy.max_draft_tokens + 1)
            while waiting or active:
                steps = []
                if waiting and len(active) < slots:
                    free = sorted(set(range(slots)) - {row.slot for row in active})
                    new = [waiting.popleft() for _ in free[: len(waiting)]]
                    for row, slot in zip(new, free, strict=False):
                        row.slot = slot
                    active.extend(new)
                    steps = self._prefill(new)
                else:
                    steps = self._step(active)
                done = {row.index: row for row in active if row.finish_reason is not None}
                for i in reversed(range(len(active))):
                    if active[i].index in done:  # the last sequence fills the gap; the others do not move
                        active[i] = active[-1]
                        active.pop()
                for row in done.values():
                    self._release(row, keep=row.error is None)
                caches_valid = True
                for step in steps:
                    if step.index in done:
                        row = done[step.index]
                        step = dataclasses.replace(step, finish_reason=row.finish_reason, output=row.output())
                    yield step
                caches_valid = False
        finally:
            for row in active:
                self._release(row, keep=caches_valid)
            release(owner)

    def _claim(self, owner: object) -> None:
        """Claim this Decoder, its scorers and its drafter for one call, or raise RuntimeError."""
        if not claim(self, owner):
            raise RuntimeError(
                "this Decoder is generating already, in another thread or in an unfinished stream: wait for "
                "that call, close that stream, or give each thread a Decoder of its own"
            )
        for part in (self.drafter, *self._scorers()):
            if part is not None and not claim(part, owner):
                raise RuntimeError(
                    f"this {type(part).__name__} is in use by another Decoder: wait for that call, close "
                    f"that stream, or give each Decoder a {type(part).__name__} of its own"
                )

    def _release(self, row: SequenceState, keep: bool) -> None:
        self.scorer.reset([row.slot], [row.tokens] if keep else None)
        if self.drafter is not None:
            self.drafter.reset([row.slot])
        self.policy.reset([row.slot])


def policy_of(num_draft_tokens: Any) -> DraftLengthPolicy:
    """Return the draft-length policy that a user passed; an int becomes ``Fixed``."""
    if isinstance(num_draft_tokens, numbers.Integral):
        integer(
            "num_draft_tokens", num_draft_tokens, "an int >= 0, or a draft-length policy", lambda g: g >= 0
        )
        return Fixed(int(num_draft_tokens))
    if isinstance(num_draft_tokens, DraftLengthPolicy):
        return num_draft_tokens
    known = ("Fixed", "Heuristic", "Goodput")
    hint = suggestion(num_draft_tokens, known) if isinstance(num_draft_tokens, str) else ""
    expected = 'an int, "auto", Fixed(5), Heuristic(), Goodput() or another DraftLengthPolicy'
    raise TypeError(f"num_draft_tokens: got {kind(num_draft_tokens)[:80]}; it must be {expected}{hint}")
