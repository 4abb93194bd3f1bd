"""The ``Decoder``: a target model, a drafter and a draft-length policy, as fronts of the scheduler."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import warnings
from collections.abc import Generator, Hashable, Sequence
from typing import Any, Unpack, overload

import torch

from outpace.checks.arguments import boolean, integer, kind, suggests
from outpace.draft.base import Drafter
from outpace.draft.resolve import resolve_drafter
from outpace.engine.claims import claim, release
from outpace.engine.eager import EagerExecutor
from outpace.engine.executor import Executor
from outpace.engine.graph import GraphExecutor
from outpace.engine.models import check_models, why_no_graphs
from outpace.engine.needs import Needs
from outpace.engine.request import Arrays, Options, Prompt, Prompts, Reader
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import Output, SequenceState, Step
from outpace.models.choice import scorer_of, why_not_fused
from outpace.models.encoder import EncoderScorer
from outpace.models.scorer import Scorer
from outpace.policy import DraftLengthPolicy, Fixed, Goodput
from outpace.policy.resolve import repeatable, resolve_policy
from outpace.sampling import SamplingParams, from_generation_config
from outpace.verification import Rule, check, start_kernels
from outpace.verification.rules import MATCH, parse

MAX_DRAFT_TOKENS = 16  # per step, by default
MAX_REQUESTED = 64  # draft tokens per step that a request may set
MAX_BATCH = 256  # sequences at a time, of a scheduler by default

if torch.version.cuda is not None:
    start_kernels()  # while weights are loaded


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
            docs/design/verification.md. By default requests with a seed have rule "match", so that their
            texts repeat. All others have rule "token".
        lenience: For rule "token". A value below 1 accepts more draft tokens and is not exact.
        num_draft_tokens: The draft-length policy: an int for ``Fixed``, ``Heuristic(start)``, or
            ``Goodput()``, which is "auto", the default. ``Goodput`` decides by measured time. It is designed
            never to be slower than decoding without speculation. See docs/guides/draft-length.md.
        draft_sampling: The drafter's sampling parameters. By default they are the target's.
        pack: On a CPU, keep a second copy of the weights. It makes forward passes over few tokens faster.
        engine: True uses the graph executor if the models allow it, which ``describe`` says. On CUDA it runs
            a step as one CUDA graph. The default is True on CUDA, and False on other devices.
        kv_cache_bytes: The most bytes of the KV caches of target and draft model. A request that needs more
            alone fails. Other requests wait until there is memory. By default 90 % of the memory that is free
            when a call begins.

    Attributes:
        drafter: A ``Drafter``, or None. The draft model of a ``ModelDrafter`` or ``TextDrafter`` is
            ``drafter.scorer.model``.
        scorer: The target with its KV cache.
        policy: The draft-length policy.
        executor: The executor, which runs the steps.
        uses_graphs: Whether the graph executor runs where it can.
    """

    @suggests
    def __init__(
        self,
        target: Any,
        draft: Drafter | torch.nn.Module | str | None = None,
        tokenizer: Any = None,
        *,
        rule: Rule | str | None = None,
        lenience: float = 1.0,
        num_draft_tokens: DraftLengthPolicy | int | str | None = None,
        draft_sampling: SamplingParams | None = None,
        pack: bool = False,
        engine: bool | None = None,
        kv_cache_bytes: int | None = None,
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
        if kv_cache_bytes is not None:
            integer("kv_cache_bytes", kv_cache_bytes, "an int >= 1, in bytes", lambda size: size >= 1)
        self._kv_cache_bytes = kv_cache_bytes
        self.scorer = scorer_of(target)
        self.drafter = resolve_drafter(draft)
        check_models(self._scorers())
        self.rule = parse("token" if rule is None else rule)
        check.lenience(lenience, self.rule)
        self.lenience = lenience
        most = min(MAX_DRAFT_TOKENS, self.scorer.context - 1)
        self._default_policy = Fixed(0) if self.drafter is None else Goodput(most)
        self.set_policy(num_draft_tokens)
        if not isinstance(draft_sampling, SamplingParams | None):
            raise TypeError(f"draft_sampling: got {kind(draft_sampling)}; it must be a SamplingParams")
        if self.drafter is not None:
            self.drafter.check(self.scorer, tokenizer)
        if pack:
            for scorer in self._scorers():
                scorer.pack()
        self.uses_graphs = self.scorer.device.type == "cuda" if engine is None else engine
        match = None if rule is None and lenience == 1 else self.rule == MATCH
        most_of_request = None if self.drafter is None else min(MAX_REQUESTED, self.scorer.context - 1)
        self.reader = Reader(self.scorer, tokenizer, draft_sampling, match, most_of_request)
        if draft_sampling is not None:
            self.reader.check_supported(draft_sampling)
        self._built_for: tuple[list[Scorer], list[Hashable]] | None = None
        self._refresh()

    def set_policy(self, num_draft_tokens: DraftLengthPolicy | int | str | None) -> None:
        """Change the draft-length policy. The default one keeps what it has learned.

        Args:
            num_draft_tokens: As in ``Decoder``.
        """
        if num_draft_tokens in (None, "auto"):
            num_draft_tokens = self._default_policy
        self.policy = resolve_policy(num_draft_tokens, self.scorer.context)

    def with_policy(self, num_draft_tokens: DraftLengthPolicy | int) -> Decoder:
        """Return a decoder with another draft-length policy, which shares all else, captured graphs too."""
        other = copy.copy(self)
        other.policy = resolve_policy(num_draft_tokens, self.scorer.context)
        return other

    def with_own_rule(self) -> Decoder:
        """Return a decoder that shares all else, and uses its rule for requests with a seed, too."""
        other = copy.copy(self)
        other.reader = dataclasses.replace(self.reader, match=self.rule == MATCH)
        return other

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

        A single prompt that fails raises its error. In a list, a prompt that fails, cannot be read, or has a
        wrong argument of its own gets ``finish_reason`` "error" and its ``error``. A warning names its index,
        and the other prompts go on.

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
            max_new_tokens: The most new tokens per sequence, or a list of one number per prompt. The default
                is the ``generation_config``'s, or 256.
            stop: A string, or a list of strings, that end a sequence. They are not part of its text. A list
                of strings is one set for all prompts. For one set per prompt, pass a list whose entries are
                lists of strings or None.
            stop_tokens: Token ids that end a sequence, in addition to the model's end-of-text.
            ignore_eos: Continue after end-of-text.
            seed: An int, or one per prompt. None takes a fresh seed. Equal seeds and prompts give equal texts
                if decoding is greedy, with rule "match", or with a policy that does not depend on measured
                time.
            logprobs: True returns log-probabilities. An int k also returns those of the k likeliest tokens.
                It may be a list of one value per prompt.
            prompt_logprobs: The same for the tokens of the prompt. Sampling parameters do not change them.
                The target computes the prompt anew for them, even if a prefix of it is cached. Models with
                an encoder refuse it.
            scores: True returns the logits of every new token after the sampling parameters were applied.
            logits: True returns the target's own logits of every new token.
            stop_when: A function called with the ``SequenceState`` after each new token. If it returns True,
                the sequence ends there.
            batch_size: The most sequences at a time. A waiting sequence takes the slot of one that has ended.
            num_draft_tokens: Draft tokens per step, at most 64, or a list of one number per prompt. 0 decodes
                without speculation. "auto", the default, leaves the number to the Decoder's draft-length
                policy. A step has fewer if the drafter proposes fewer, or, without graphs, near the end.

        Returns:
            An ``Output`` for a single prompt, or a list of n with ``n=``. A list of ``Output`` for a list of
            prompts.
        """
        sequences, single = self.reader.sequences(prompt, sampling, n, **options)
        outputs: dict[int, Output] = {}
        for step in self._steps(sequences, options.get("batch_size")):
            if step.output is not None:
                outputs[step.index] = step.output
        for index, output in outputs.items():
            if output.error is not None:
                if single:
                    raise output.error
                reason = str(output.error).removeprefix("prompt: ")
                warnings.warn(f"prompt {index // (n or 1)}: {reason}", stacklevel=2)
        return outputs[0] if single and n is None else [outputs[i] for i in range(len(sequences))]

    def stream(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Generator[Step]:
        """Yield one ``Step`` per decode step and sequence as it happens.

        The arguments are those of ``generate``. The last step of a sequence carries its ``Output``. If a
        single prompt fails, its error is raised after the step with its last tokens.
        """
        sequences, single = self.reader.sequences(prompt, sampling, n, **options)

        def steps() -> Generator[Step]:
            with contextlib.closing(self._steps(sequences, options.get("batch_size"))) as run:
                for step in run:
                    error = step.output.error if single and step.output is not None else None
                    if error is None or step.token_ids:
                        yield step
                    if error is not None:
                        raise error

        return steps()

    def requests(
        self,
        prompt: Prompt | Arrays | Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> list[SequenceState]:
        """Return the requests of a call for ``Scheduler.add``; the arguments are those of ``generate``.

        ``batch_size`` has no effect. A prompt of a list that cannot be read becomes a request that fails.
        """
        return self.reader.sequences(prompt, sampling, n, **options)[0]

    def scheduler(self, batch_size: int = MAX_BATCH) -> Scheduler:
        """Return a scheduler, to which requests can be added while others are generated.

        The decoder serves no other call until the scheduler is closed::

            with decoder.scheduler() as scheduler:
                for request in decoder.requests("The lighthouse", max_new_tokens=64):
                    scheduler.add(request)
                while scheduler.unfinished:
                    for step in scheduler.step():
                        print(step.index, step.text)

        Args:
            batch_size: The most sequences at a time.
        """
        integer("batch_size", batch_size, "an int >= 1", lambda b: b >= 1)
        owner = object()
        try:
            return self._scheduler(owner, batch_size)
        except BaseException:
            release(owner)
            raise

    def _scheduler(
        self, owner: object, batch_size: int, sequences: Sequence[SequenceState] = ()
    ) -> Scheduler:
        """Return a scheduler, after this decoder was claimed for an owner."""
        self._claim(owner)
        self._refresh()
        return Scheduler(
            self._scorers(), self.drafter, self._policy_for(sequences), self.executor, batch_size,
            on_close=lambda: release(owner),
        )  # fmt: skip

    def _policy_for(self, sequences: Sequence[SequenceState]) -> DraftLengthPolicy:
        """Return the policy of a call.

        Texts with a seed repeat. In 16 bits, passes over other numbers of tokens round differently. So these
        numbers must not depend on measured times then.
        """
        seeded = self.reader.match is None and any(one.match for one in sequences)
        timed = self.policy is self._default_policy and self.policy.is_timed
        if not (seeded and timed and self.scorer.dtype.itemsize < 4):
            return self.policy
        free = self.drafter is not None and self.drafter.free
        return repeatable(self.policy.max_draft_tokens, free, self.uses_graphs)

    def _steps(self, sequences: list[SequenceState], batch_size: int | None) -> Generator[Step]:
        """Yield the steps of all sequences, at most ``batch_size`` at a time."""
        owner = object()
        try:
            with self._scheduler(owner, batch_size or len(sequences), sequences) as scheduler:
                readable = [one for one in sequences if one.error is None]
                if readable:
                    scheduler.prepare(readable)
                for sequence in sequences:
                    scheduler.add(sequence)
                while scheduler.unfinished:
                    yield from scheduler.step()
        finally:
            release(owner)  # also if an interruption came before the scheduler could do so

    def warm_up(
        self,
        num_draft_tokens: Sequence[int] | None = None,
        batch_sizes: Sequence[int] = (1,),
        sampling: SamplingParams | None = None,
    ) -> None:
        """Compile kernels and capture graphs of steps ahead of the first call.

        Graphs of prefill, and of a ``TextDrafter``, are captured when they are first needed. The eager
        executor has no graphs.

        Args:
            num_draft_tokens: Numbers of draft tokens. By default 0 and the policy's largest number.
            batch_sizes: Numbers of sequences.
            sampling: Sampling parameters. By default those of a call without any.
        """
        most = self.policy.max_draft_tokens
        if num_draft_tokens is None:
            num_draft_tokens = sorted({0, most})
        for g in num_draft_tokens:
            integer("num_draft_tokens", g, f"ints in 0..{most}", lambda g: 0 <= g <= most)
        for batch in batch_sizes:
            integer("batch_sizes", batch, "ints >= 1", lambda b: b >= 1)
        if sampling is None:
            sampling = from_generation_config(self.scorer.generation_config)
        owner = object()
        try:
            self._claim(owner)
            self._refresh()
            for size in batch_sizes:
                for g in num_draft_tokens:
                    request = self.reader.sequences([0], sampling, None)[0]
                    self.executor.warm_up(g, size, Needs.of(request, g))
        finally:
            release(owner)

    def release(self) -> None:
        """Free all memory that is kept between calls: KV caches and captured graphs.

        The next call allocates and captures again.
        """
        owner = object()
        try:
            self._claim(owner)
            self.executor.reset()
            for scorer in self._scorers():
                scorer.release()
        finally:
            release(owner)

    def forget(self) -> None:
        """Discard cached keys and values of earlier prompts, and pack the weights again.

        Changed weights are noticed without this call, unless they were changed through ``.data``.
        """
        owner = object()
        try:
            self._claim(owner)
            for scorer in self._scorers():
                scorer.forget()
                scorer.repack()
        finally:
            release(owner)

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
        drafter = "none, without speculation" if self.drafter is None else self.drafter.describe()
        parts = {
            "target": self.scorer.describe(),
            "drafter": drafter,
            "rule": f"{self.rule}" + (f", lenience {self.lenience}" if self.lenience < 1 else ""),
            "num_draft_tokens": self.policy.describe(),
            "executor": self._describe_executor(),
        }
        return "\n".join(f"{name:<16}  {value}" for name, value in parts.items())

    def _describe_executor(self) -> str:
        description = self.executor.describe()
        if not self.uses_graphs:
            return description
        if (reason := why_no_graphs(self._scorers(), self.rule, self.reader.draft_sampling)) is not None:
            return f"{description}, because {reason}"
        reasons = [(type(one.base).__name__, why_not_fused(one.model)) for one in self._scorers()]
        not_fused = [f"{name} is not fused, since it {why}" for name, why in reasons if why is not None]
        return "; ".join([description, *not_fused])

    # Models

    def _refresh(self) -> None:
        """Create scorers and executor again if models have changed: moved, hooked, or with adapters."""
        current = [scorer_of(one, self.uses_graphs) for one in self._scorers()]
        # Graphs read weights where they were captured
        layouts = [one.layout for one in current] if self.uses_graphs else []
        if self._built_for == (current, layouts):
            return
        self._built_for = current, layouts
        check_models(current)  # new scorers share no encoder yet
        in_graphs = self.uses_graphs and (
            why_no_graphs(current, self.rule, self.reader.draft_sampling) is None
        )
        self.scorer = current[0]
        if self.drafter is not None and len(current) > 1:
            self.drafter.scorer = current[1]
        self._share_budget()
        self.reader = dataclasses.replace(self.reader, scorer=self.scorer)
        kind = GraphExecutor if in_graphs else EagerExecutor
        self.executor: Executor = kind(self.scorer, self.drafter, self.rule, self.lenience)

    def encoders(self) -> list[EncoderScorer]:
        """Return those scorers of target and draft model that have an encoder."""
        return [one for one in self._scorers() if isinstance(one, EncoderScorer)]

    def _scorers(self) -> list[Scorer]:
        """Return the target's scorer, and the scorer of the draft model if there is one."""
        draft = None if self.drafter is None else self.drafter.scorer
        return [self.scorer, *([] if draft is None else [draft])]

    def _share_budget(self) -> None:
        """Divide the memory of the KV caches between target and draft model, by the size of a token."""
        caches = [cache for scorer in self._scorers() for cache in scorer.caches]
        if self._kv_cache_bytes is None and any(cache.max_bytes is not None for cache in caches):
            return  # another decoder, which shares the scorers, has set it
        total = sum(cache.bytes_per_token for cache in caches)
        for cache in caches:
            cache.share = cache.bytes_per_token / total
            cache.max_bytes = self._kv_cache_bytes

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
