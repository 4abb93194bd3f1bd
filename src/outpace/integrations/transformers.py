"""Inside Transformers: `model.generate(..., custom_generate=outpace.generate, draft=small)`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from outpace.arguments import kind
from outpace.decode import Decoder
from outpace.draft import drafter_of
from outpace.draft.base import Drafter
from outpace.draft.model import ModelDrafter
from outpace.integrations.assisted import patch, patched, unpatch
from outpace.integrations.processors import samplings
from outpace.integrations.shelf import Shelf
from outpace.integrations.sources import encoded, listen
from outpace.length import Heuristic, Length
from outpace.models.causal import CausalScorer
from outpace.models.seq2seq import Seq2SeqScorer, scorer_of
from outpace.request import seed_of
from outpace.rows import Output, Row
from outpace.stats import Stats
from outpace.verify import Rule
from outpace.wording import suggestion

__all__ = ["Generation", "forget", "generate", "patch", "patched", "unpatch"]

_targets = Shelf(scorer_of)
_drafters = Shelf(ModelDrafter)


@dataclass
class Generation(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `return_dict_in_generate=True` gives: Transformers' own output, and the Stats of all rows."""

    stats: Stats | None = None


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    draft: torch.nn.Module | Drafter | str | None = None,
    *,
    rule: Rule | str = "token",
    lenience: float = 1.0,
    length: Length | int | None = None,
    seed: int | Sequence[int] | None = None,
    stats: Stats | None = None,
    decoder: Decoder | None = None,
    streamer: Any = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor | Generation | GenerateEncoderDecoderOutput:
    """Speculative decoding for `model.generate(..., custom_generate=outpace.generate, draft=...)`.

    draft     who guesses: a smaller model of the same tokenizer, a Drafter, or "lookup"
    rule, lenience, length
              as in `Decoder`, but that by default samples are drawn with `Heuristic()`, so that they can be
              repeated
    seed      an int, or one per prompt; None draws seeds from PyTorch's generator, so that
              `torch.manual_seed` makes a run repeatable
    stats     a `Stats` to which this call adds what happened
    decoder   a `Decoder` of this model, used instead of draft, rule, lenience and length: it keeps what it
              has set up from call to call
    streamer  give it to `model.generate`; here it is for `functools.partial`
    inputs_tensor
              is Transformers' own: what the encoder was given

    Everything else is as Transformers has it: docs/transformers.md.
    """
    kept = _kept_back(model)
    if decoder is None:
        _check_draft(draft, kept.get("assistant_model"))
    else:
        _check_decoder(decoder, model, draft)
    _refuse_other_modes(generation_config, kept.get("synced_gpus"))
    theirs = encoded(model, inputs_tensor, model_kwargs, len(input_ids))
    prompts = _prompts(input_ids, model_kwargs)
    logits_processor = listen(model, logits_processor, input_ids, theirs)
    streamer = _streamer(streamer, kept.get("streamer"), input_ids)
    with contextlib.ExitStack() as lent:
        if decoder is None:
            target = lent.enter_context(_targets.lend(model))
            if length is None and generation_config.do_sample and f"{rule}" != "match":
                # Seeds are Transformers' way to repeat a run, which a length that goes by the clock does not.
                length = Heuristic(most=min(20, target.context - 1))
            decoder = Decoder(
                target,
                lent.enter_context(_drafters.lend(draft))
                if isinstance(draft, torch.nn.Module)
                else drafter_of(draft),
                rule=rule,
                lenience=lenience,
                length=length,
                engine=False,  # which is worth its graphs only if it stays
            )
        scorer = decoder.scorer
        given: Any = prompts
        if isinstance(scorer, Seq2SeqScorer):
            given = [one.source(prompt, scorer) for one, prompt in zip(theirs, prompts, strict=True)]
        stops = _Stops(stopping_criteria, input_ids, generation_config, scorer)
        wanted = bool(generation_config.return_dict_in_generate)
        steps = decoder.stream(
            given,
            samplings(logits_processor, bool(generation_config.do_sample), input_ids, prompts, scorer.device),
            max_new_tokens=stops.max_new_tokens,
            stop_tokens=stops.tokens,
            ignore_eos=True,  # those that count are among the criteria
            stop_when=stops.ask if stops.others else None,
            seed=_seeds(seed, len(prompts), generation_config.num_return_sequences or 1),
            scores=wanted and bool(generation_config.output_scores),
            logits=wanted and bool(generation_config.output_logits),
        )
        outputs: dict[int, Output] = {}
        with contextlib.closing(steps):
            for step in steps:
                if step.output is not None:
                    if step.output.error is not None:
                        raise ValueError(f"row {step.row}: {step.output.error}") from step.output.error
                    outputs[step.row] = step.output
                if streamer is not None:
                    streamer.put(torch.tensor(step.tokens))
    if streamer is not None:
        streamer.end()
    rows = [outputs[i] for i in range(len(prompts))]
    total = sum((row.stats for row in rows), Stats())
    if stats is not None:
        vars(stats).update(vars(stats + total))
    sequences = stops.sequences(rows)
    if not wanted:
        return sequences
    scores, logits = (
        _by_position(kept, input_ids.device)
        for kept in ([row.scores for row in rows], [row.logits for row in rows])
    )
    if theirs:
        return GenerateEncoderDecoderOutput(sequences=sequences, scores=scores, logits=logits)
    return Generation(sequences=sequences, scores=scores, logits=logits, stats=total)


def forget() -> None:
    """Free what is kept from call to call: caches, with the texts in them."""
    _targets.clear()
    _drafters.clear()


# What comes in


KEPT = ("streamer", "assistant_model", "synced_gpus")
"""Arguments of Transformers' `generate` that it does not pass on to a callable."""
SEEN = "5.17.0 and 5.23.0"
"""Versions of Transformers in which `_kept_back` was seen to find them."""


def _kept_back(model: Any) -> dict[str, Any]:
    """Return the arguments that Transformers' `generate` was given and keeps from a callable.

    There is no public way to them: `generate` passes a callable those of its `**kwargs` that the callable
    names, and these three are named arguments of its own. Without them a streamer would be shown the prompt
    and never end, an assistant would be ignored, and processes in step would wait for each other. They are
    read from the frame of the `generate` that called: `SEEN` has the versions. A caller of `outpace.generate`
    itself has no such frame, and nothing is kept back.
    """
    frame = sys._getframe()
    while frame is not None:
        theirs = frame.f_globals.get("__name__") == GenerationMixin.__module__
        known = frame.f_locals if theirs else {}
        if known.get("self") is model:
            missing = [name for name in KEPT if name not in known]
            if missing:
                raise RuntimeError(
                    f"{missing[0]}: outpace cannot see whether generate was given it in Transformers "
                    f"{transformers.__version__}; it was seen in {SEEN}"
                )
            return {name: known[name] for name in KEPT}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _check_decoder(decoder: Any, model: Any, draft: Any) -> None:
    if not isinstance(decoder, Decoder) or decoder.scorer.model is not model:
        raise ValueError("decoder: it must be a Decoder whose target is the model that generates")
    if draft is not None:
        raise ValueError("draft: given together with decoder, which has its own; give one or the other")


def _check_draft(draft: Any, assistant_model: Any) -> None:
    fits = 'a smaller model, a Drafter such as outpace.LookupDrafter(), or "lookup"'
    if assistant_model is not None:
        raise ValueError(
            "assistant_model: Transformers keeps it from custom_generate; pass the model as draft= instead"
        )
    if draft is None:
        raise ValueError(f"draft: nothing was given; pass {fits}")
    if isinstance(draft, str):
        if draft != "lookup":
            raise ValueError(f"draft: got {draft!r}; it must be {fits}{suggestion(draft, ['lookup'])}")
    elif isinstance(draft, type) or not (isinstance(draft, torch.nn.Module) or hasattr(draft, "propose")):
        raise TypeError(f"draft: got {kind(draft)[:80]}; it must be {fits}")


_MODES = {  # what asks for another way of generating, and its value where it does not
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("constraints", "force_words_ids", "penalty_alpha", "dola_layers")),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit")),
    "use_mtp": False,
}


def _refuse_other_modes(config: Any, synced_gpus: bool | None) -> None:
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        given = [name for name, off in _MODES.items() if getattr(config, name, None) not in (None, off)]
        own = '; what guesses is named by draft=, for prompt lookup draft="lookup"'
        raise ValueError(
            f"{', '.join(given)}: asks for {mode.value.replace('_', ' ')}; outpace does greedy search and "
            f"sampling{own if mode == 'assisted_generation' else ''}"
        )
    if synced_gpus:
        raise ValueError("synced_gpus: got True; outpace runs on one process, where it must be False")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"{name}: got True; outpace keeps scores and logits only, so it must be False")


_UNUSED = {"use_cache", "logits_to_keep", "cache_position"}  # the scorer decides those itself


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The tokens of each row without padding."""
    given = {name: value for name, value in model_kwargs.items() if value is not None}
    mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
    if "encoder_outputs" in given:  # then those were of what the encoder read
        mask = given.pop("decoder_attention_mask", None)
        positions = given.pop("decoder_position_ids", None)
        del given["encoder_outputs"]
    past = given.pop("past_key_values", None)
    strange = sorted(given.keys() - _UNUSED)
    if strange:
        raise ValueError(f"{strange[0]}: outpace scores token ids alone and cannot use it; leave it out")
    if past is not None and past.get_seq_length():
        raise ValueError(
            "past_key_values: got a cache that is not empty; outpace keeps its own from call to call, so "
            "pass the whole text as input_ids"
        )
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    if real.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: got shape {tuple(real.shape)}; it must be that of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    if not real[:, -1:].all():
        raise ValueError(
            "attention_mask: it hides the last token of a row; pad on the left (tokenizer.padding_side)"
        )
    if positions is not None:
        usual = real.long().cumsum(-1) - 1
        if positions.shape[-1] != usual.shape[-1] or ((positions.to(usual.device) != usual) & real).any():
            raise ValueError("position_ids: outpace counts each row's tokens from 0; leave it out")
    return [row[own].tolist() for row, own in zip(input_ids, real, strict=True)]


def _streamer(own: Any, kept: Any, input_ids: Tensor) -> Any:
    """The streamer, with the prompt put in."""
    streamer = kept if own is None else own
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"streamer: got {len(input_ids)} rows; a streamer takes a single one")
    if own is not None and own is not kept:  # of the other Transformers knew, and put it in
        own.put(input_ids.cpu())
    return streamer


def _seeds(seed: int | Sequence[int] | None, rows: int, each: int) -> list[int] | None:
    if seed is None:
        return None
    return [seed_of(seed, row // each, row % each, rows // each) for row in range(rows)]


# Where rows end, and what goes out


class _Stops:
    """The stopping criteria of a call, and the rows as the criteria see them: padded, the prompt included.

    Lengths and end-of-text tokens the decoder knows by itself; the others are asked after each token, row by
    row, so that one that is true inside a block of kept drafts ends the row there.
    """

    def __init__(self, criteria: Sequence[Any], input_ids: Tensor, config: Any, scorer: CausalScorer) -> None:
        rows, self._width = input_ids.shape
        known = (MaxLengthCriteria, EosTokenCriteria)
        self.others = StoppingCriteriaList([one for one in criteria if type(one) not in known])
        lengths = [one.max_length - self._width for one in criteria if type(one) is MaxLengthCriteria]
        self.max_new_tokens: int = max(1, min([*lengths, scorer.context]))
        ends = [one.eos_token_id.tolist() for one in criteria if type(one) is EosTokenCriteria]
        self.tokens = sorted({token for ids in ends for token in ids if 0 <= token < scorer.vocab_size})
        pad = config._pad_token_tensor
        early = self.tokens or self.others or self._width + self.max_new_tokens > scorer.context
        if pad is None and rows > 1 and early:
            raise ValueError("pad_token_id: nothing was given, and rows that end early need one; pass it")
        room = (rows, self._width + self.max_new_tokens)
        self._ids = input_ids.new_full(room, 0 if pad is None else int(pad))
        self._ids[:, : self._width] = input_ids

    def ask(self, row: Row) -> bool:
        length = self._width + row.stats.new_tokens
        self._ids[row.index, length - 1] = row.tokens[-1]
        scores = None
        if row.scores is not None:
            scores = tuple(one[None].to(self._ids.device) for one in row.scores[: row.stats.new_tokens])
        return bool(self.others(self._ids[row.index, :length][None], scores).any())

    def sequences(self, rows: Sequence[Output]) -> Tensor:
        """`[R, longest]`, filled up on the right."""
        for ids, row in zip(self._ids, rows, strict=True):
            ids[self._width : self._width + len(row.tokens)] = torch.tensor(row.tokens)
        return self._ids[:, : self._width + max(len(row.tokens) for row in rows)].clone()


def _by_position(rows: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, ...] | None:
    """Of each position `[R, V]`; where a row has ended, zeros."""
    wanted = [row for row in rows if row is not None]
    return tuple(torch.nn.utils.rnn.pad_sequence(wanted).to(device)) if wanted else None
