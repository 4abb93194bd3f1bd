"""The iteration of speculative decoding, and the Decoder around it: the only place where the rooms meet."""

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

from outpace import engined
from outpace.advance import advance
from outpace.arguments import boolean, integer, kind, on_device, suggests
from outpace.claims import claim, release
from outpace.draft import drafter_of
from outpace.draft.base import Draft, Drafter, one_for_all
from outpace.draft.model import ModelDrafter
from outpace.draft.text import TextDrafter
from outpace.engines import Engines
from outpace.guess import Guesser, seeds
from outpace.length import Fixed, Goodput, Length
from outpace.logprobs import adjusted, keep, note
from outpace.models.causal import CausalScorer
from outpace.models.seq2seq import Seq2SeqScorer, scorer_of
from outpace.request import Arrays, Options, Prompt, Prompts, Reader
from outpace.rows import Output, Row, Step
from outpace.sampling import Prefix, Sampling
from outpace.stats import Clock
from outpace.verify import Rule, Verdict, check, settle
from outpace.verify.block import Block
from outpace.verify.rules import parse
from outpace.wording import suggestion

WithModel = ModelDrafter | TextDrafter
MOST = 16  # guesses an iteration, where the caller does not say
# What a length policy has
POLICY = ("choose", "most", "asks", "idle", "enough", "observe", "withdraw", "reset")


class Decoder:
    """Generates from a target model, helped by a drafter, with exactly the target's distribution.

    target          a causal model of the Transformers library, or an encoder-decoder one (T5, mT5, BART,
                    Marian, Whisper), whose prompts are what its encoder reads; or a scorer of one
    drafter         a Drafter, a smaller model of the same tokenizer, or "lookup"; None decodes plainly
    tokenizer       the target's, for text prompts, text output and stop strings
    rule            "token", "block", "match", or `sigmoid(alpha, beta)`, which is not exact: docs/rules.md
    lenience        for rule "token": below 1 it keeps more drafts and is not exact
    length          how far to guess: `Fixed(g)`, `Heuristic(start)`, or `Goodput()`, the default, which goes
                    by the clock, so as never to be slower than plain decoding: docs/length.md
    draft_sampling  how the drafter draws; by default as the target does
    pack            on a CPU, keep a second copy of the weights that makes passes over few tokens faster
    engine          run iterations as one function of tensors, on CUDA as one graph, where models and rows
                    allow it (`describe` says whether the models do); by default on CUDA

    One call at a time: a second one, from another thread or while a stream is unfinished, raises.

    Attributes: `target`, the model as it was given; `tokenizer`; `drafter`, a Drafter or None. The model of a
    ModelDrafter or TextDrafter is `drafter.scorer.model`.
    """

    @suggests
    def __init__(
        self,
        target: Any,
        drafter: Drafter | torch.nn.Module | str | None = None,
        tokenizer: Any = None,
        *,
        rule: Rule | str = "token",
        lenience: float = 1.0,
        length: Length | int | None = None,
        draft_sampling: Sampling | None = None,
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
        self.drafter = drafter_of(drafter)
        self._check_encoders()
        self.rule = parse(rule)
        check.lenience(lenience, self.rule)
        self.lenience = lenience
        if length is None:
            length = Fixed(0) if drafter is None else Goodput(min(MOST, self.scorer.context - 1))
        self.length: Length = length_of(length)
        if self.length.most >= self.scorer.context:
            raise ValueError(
                f"length: {self.length!r} does not fit a context of {self.scorer.context} tokens"
            )
        if not isinstance(draft_sampling, Sampling | None):
            raise TypeError(f"draft_sampling: got {kind(draft_sampling)}; it must be a Sampling")
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
        self._engines = Engines(self.scorer, self.drafter, self.rule, self.lenience) if engine else None
        self._reader = Reader(self.scorer, tokenizer, draft_sampling)

    @property
    def target(self) -> Any:
        """The Transformers model, as it was given."""
        return self.scorer.model

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer; None if none was given."""
        return self._reader.tokenizer

    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Output: ...

    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: int, **options: Unpack[Options]
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompt: Arrays,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Any: ...

    def generate(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Output | list[Output]:
        """Generate from a prompt, or from a list of them, as one ragged batch.

        prompt          a string, messages (`[{"role": "user", "content": "Hello"}]`), token ids, or what a
                        tokenizer returns; or a list of prompts. Messages go through the chat template. Of
                        tensors, arrays and encodings, `[n]` and `[1, n]` are one prompt, `[B, n]` is B; an
                        encoding's attention_mask takes padding out
        sampling        a `Sampling`, or one per prompt; or name its fields: temperature=0.8, top_p=0.95, ...
                        With neither, the target's generation_config decides, as in Transformers
        max_new_tokens  at most so many; by default the generation_config's, or 256
        stop            a string, or several, that end a text; they are not part of it
        stop_tokens     token ids that do, beside the model's end-of-text
        ignore_eos      go on after end-of-text
        seed            an int, or one per prompt; None is fresh. Equal seeds and prompts give equal texts, if
                        greedy, with rule "match", or with a length that does not go by the clock
        n               samples per prompt; they come one after the other, and the prompt is computed once
        logprobs        True, or k for the k likeliest tokens too
        scores, logits  True keeps the adjusted logits, and the target's own, of every new token
        stop_when       called with each row after every token it gained; True ends the row there
        batch_size      at most so many rows at a time; the next takes the place of one that is done

        A single prompt gives an `Output`, with n= a list of n, and raises if it fails. A list gives a list. A
        prompt of a list that fails, or that cannot be read, has finish_reason "error" and its `error`, and a
        warning names its index; the others go on.
        """
        rows, single = self._reader.rows(prompt, sampling, n, **options)
        outputs: dict[int, Output] = {}
        for step in self._steps(rows, options.get("batch_size")):
            if step.output is not None:
                outputs[step.row] = step.output
        for row, output in outputs.items():
            if output.error is not None:
                if single:
                    raise output.error
                warnings.warn(f"prompt {row // (n or 1)}: {output.error}", stacklevel=2)
        return outputs[0] if single and n is None else [outputs[i] for i in range(len(rows))]

    def stream(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Generator[Step]:
        """The same, one `Step` per iteration and row as it happens; the last of a row has its Output."""
        rows, single = self._reader.rows(prompt, sampling, n, **options)

        def steps() -> Generator[Step]:
            with contextlib.closing(self._steps(rows, options.get("batch_size"))) as run:
                for step in run:
                    if single and step.output is not None and step.output.error is not None:
                        raise step.output.error
                    yield step

        return steps()

    def _steps(self, rows: list[Row], batch_size: int | None) -> Generator[Step]:
        """Yield one step for each prompt that could not be read, then the steps of the others."""
        yield from (row.refused() for row in rows if row.error is not None)
        readable = [row for row in rows if row.error is None]
        if readable:
            yield from self._run(readable, batch_size)

    def forget(self) -> None:
        """Keep nothing of earlier prompts, nor of weights. Weights that change are noticed, unless through
        `.data`."""
        self.scorer.forget()
        self.scorer.repack()
        if isinstance(self.drafter, WithModel):
            self.drafter.forget()

    @overload
    def encode(self, prompt: Prompt) -> list[int]: ...

    @overload
    def encode(self, prompt: Prompts) -> list[list[int]]: ...

    @overload
    def encode(self, prompt: Arrays) -> Any: ...

    def encode(self, prompt: Prompt | Arrays | Prompts) -> list[int] | list[list[int]]:
        """Return the token ids of a prompt that `generate` takes; of a list, those of each."""
        return self._reader.encode(prompt)

    def describe(self) -> str:
        """What runs here and how, for people."""
        drafter = "none, plain decoding" if self.drafter is None else type(self.drafter).__name__
        if isinstance(self.drafter, WithModel):
            drafter = self.drafter.describe()
        lines = [
            f"target   {self.scorer.describe()}",
            f"drafter  {drafter}",
            f"rule     {self.rule}" + (f", lenience {self.lenience}" if self.lenience < 1 else ""),
            f"length   {self.length!r}",
        ]
        if self._engines is not None:
            lines.append(f"engine   {self._engines.describe()}")
        return "\n".join(lines)

    # The iteration

    @torch.inference_mode()
    def _iteration(self, rows: list[Row]) -> list[Step]:
        """One pass of the target and g guesses bring each row from 1 to g+1 new tokens."""
        clock = Clock()
        slots = [row.slot for row in rows]
        proposal = self._guesser.propose(rows, self._guesser.load(rows))
        draft, state = proposal.draft, proposal.state  # tokens [R, g] from q
        clock.lap("draft")
        last = on_device([row.tokens[-1] for row in rows], torch.int64, self.scorer.device)
        logits = self.scorer.score(slots, torch.cat((last[:, None], draft.tokens), dim=1))  # [R, g+1, V] of p
        clock.lap("target")
        verdict = self._verify(rows, draft, logits)
        outcome = torch.stack((verdict.accepted, verdict.next_token, verdict.bad)).cpu()
        accepted, next_token, bad = outcome.tolist()
        clock.lap("verify")
        self.scorer.commit(slots, [1 + kept for kept in accepted])
        if state is not None and self.drafter is not None:
            self.drafter.commit(outcome[0], outcome[1])
        steps = advance(rows, draft, state, (accepted, next_token, bad), self.scorer.context)
        phases = clock.share([row.stats for row in rows])
        self.length.observe(proposal.done(rows, accepted, next_token, phases))
        return [replace(step, phases=phases) for step in steps]

    @torch.inference_mode()
    def _begin(self, rows: list[Row]) -> list[Step]:
        """The prompts go through the target, which draws each row's first token: an iteration of g = 0."""
        clock = Clock()
        sources = [row.source for row in rows]
        for scorer in self.encoders():
            longest = max(len(row.tokens) for row in rows)
            scorer.take_in([row.slot for row in rows], [one for one in sources if one is not None], longest)
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

    def _verify(self, rows: list[Row], draft: Draft, logits: Tensor) -> Verdict:
        samplings = [row.sampling for row in rows]
        prefix = None
        if any(sampling.reads_prefix for sampling in samplings):
            prompts = [row.prompt_length for row in rows]
            prefix = Prefix.padded([row.tokens for row in rows], prompts, logits.device)
        if draft.logits is not None:
            # One precision, and never less than the target's.
            wide = torch.promote_types(logits.dtype, draft.logits.dtype)
            logits, draft = logits.to(wide), replace(draft, logits=draft.logits.to(wide))
        scores = None
        if any(row.top is not None or row.scores is not None for row in rows):
            scores = adjusted(logits, samplings, prefix, draft)
        verdict = settle(
            self._block(rows, draft, logits),
            self.rule,
            self.lenience,
            one_for_all(samplings),
            None if draft.told is None else draft.told.sampling,
            prefix,
        )
        if any(row.scores is not None or row.logits is not None for row in rows):
            keep(rows, verdict, logits, scores)
        if scores is not None and any(row.top is not None for row in rows):
            note(rows, draft, verdict, scores)
        return verdict

    def _block(self, rows: list[Row], draft: Draft, logits: Tensor) -> Block:
        R, g, device = len(rows), draft.tokens.shape[1], logits.device
        ragged = any(length < g for length in draft.lengths or ())
        lengths = on_device(list(draft.lengths or [0] * R), torch.int64, device) if ragged else None
        tokens, strange = draft.tokens, None
        if lengths is not None:
            tokens = tokens.masked_fill(torch.arange(g, device=device) >= lengths[:, None], 0)
        if device.type != "cpu" and g:  # on the CPU, `check_draft` has looked
            tokens, strange = check.tokens(tokens, None, logits.shape[-1])
        alone = R == 1  # then numbers need no tensors
        told = draft.told
        return Block(
            tokens,
            draft.logits,
            logits,
            None if told is None else told.lse,
            rows[0].seed if alone else seeds(rows, device),
            len(rows[0].tokens)
            if alone
            else on_device([len(row.tokens) for row in rows], torch.int64, device),
            lengths,
            strange,
            draft_cut=None if told is None else told.cut,
            draft_tie=None if told is None else told.tie,
            in_turn=True,
        )

    def _scorers(self) -> list[CausalScorer]:
        """The target's, and the draft's if it has one."""
        return [self.scorer, *([self.drafter.scorer] if isinstance(self.drafter, WithModel) else [])]

    def encoders(self) -> list[Seq2SeqScorer]:
        """Those of target and draft that have one."""
        return [scorer for scorer in self._scorers() if isinstance(scorer, Seq2SeqScorer)]

    def _check_encoders(self) -> None:
        """Two that are the same work once; a draft's alone would have nothing to read."""
        if isinstance(self.drafter, WithModel) and self.drafter.scorer is self.scorer:
            raise ValueError(
                "drafter: it has the target's own scorer, and each needs a KV cache of its own; give it the "
                "model"
            )
        encoders = self.encoders()
        if len(encoders) == 2:
            encoders[1].share_encoder(encoders[0])
        elif encoders and encoders[0] is not self.scorer:
            raise ValueError("drafter: an encoder-decoder model cannot draft for a target without an encoder")

    # Rows come and go

    def _run(self, rows: list[Row], batch_size: int | None) -> Generator[Step]:
        """All rows to their ends, as many at a time as there are slots."""
        owner = object()
        waiting, active = deque(rows), list[Row]()
        sound = False  # whether what the caches hold is what the rows say
        try:
            self._claim(owner)
            self._guesser = Guesser(self.scorer, self.drafter, self.length, self.rule)
            slots = min(batch_size or len(rows), len(rows))
            longest = max(min(row.prompt_length + row.max_new_tokens, self.scorer.context) for row in rows)
            if self._engines is not None:
                engine = self._engines.take(rows, slots, longest + 2 * (self.length.most + 1))
                if engine is not None:
                    if isinstance(self.drafter, TextDrafter):
                        self.drafter.reserve(slots, longest + self.length.most + 1)
                    inside, sampling = self._engines.inside, waiting[0].sampling
                    yield from engined.Run(engine, self._guesser, slots, inside, sampling).steps(waiting)
                    return
            self.scorer.reserve(slots, longest + self.length.most + 1)
            if isinstance(self.drafter, WithModel):
                self.drafter.reserve(slots, longest + self.length.most + 1)
            while waiting or active:
                steps = []
                if waiting and len(active) < slots:
                    free = sorted(set(range(slots)) - {row.slot for row in active})
                    new = [waiting.popleft() for _ in free[: len(waiting)]]
                    for row, slot in zip(new, free, strict=False):
                        row.slot = slot
                    active.extend(new)
                    steps = self._begin(new)
                else:
                    steps = self._iteration(active)
                done = {row.index: row for row in active if row.finish_reason is not None}
                for i in reversed(range(len(active))):
                    if active[i].index in done:  # the last one takes its place, and the others keep theirs
                        active[i] = active[-1]
                        active.pop()
                for row in done.values():
                    self._release(row, keep=row.error is None)
                sound = True
                for step in steps:
                    if step.row in done:
                        row = done[step.row]
                        step = dataclasses.replace(step, finish_reason=row.finish_reason, output=row.output())
                    yield step
                sound = False
        finally:
            for row in active:
                self._release(row, keep=sound)
            release(owner)

    def _claim(self, owner: object) -> None:
        """Take this Decoder and all that it decodes with, or raise RuntimeError."""
        if not claim(self, owner):
            raise RuntimeError(
                "this Decoder is generating already: in another thread, or in a stream that was neither "
                "read to its end nor closed; wait for it, or give each thread a Decoder of its own"
            )
        for part in (self.drafter, *self._scorers()):
            if part is not None and not claim(part, owner):
                raise RuntimeError(
                    f"this {type(part).__name__} is at work for another Decoder, whose sequences it holds: "
                    "wait for that call, close that stream, or give each Decoder its own"
                )

    def _release(self, row: Row, keep: bool) -> None:
        self.scorer.reset([row.slot], [row.tokens] if keep else None)
        if self.drafter is not None:
            self.drafter.reset([row.slot])
        self.length.reset([row.slot])


def length_of(length: Any) -> Length:
    """Return the draft-length policy that a user gave, or named by an int."""
    if isinstance(length, numbers.Integral):
        integer("length", length, "an int >= 0, or a length policy", lambda g: g >= 0)
        return Fixed(int(length))
    lacks = [name for name in POLICY if not hasattr(length, name)]
    if isinstance(length, type) or "choose" in lacks:  # a class is no policy yet
        close = suggestion(length, ("Fixed", "Heuristic", "Goodput")) if isinstance(length, str) else ""
        fits = "an int, Fixed(g), Heuristic(start) or Goodput()"
        raise TypeError(f"length: got {kind(length)[:80]}; it must be {fits}{close}")
    if lacks:
        raise TypeError(f"length: {kind(length)} has no {lacks[0]}; derive it from outpace.length.Length")
    return length  # type: ignore[no-any-return]
