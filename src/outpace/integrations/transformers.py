"""Speculative decoding inside Transformers' ``generate``.

Use ``model.generate(..., custom_generate=outpace.generate, draft=small)``.
"""

from __future__ import annotations

import contextlib
import functools
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

from outpace.checks.arguments import kind
from outpace.checks.errors import suggestion
from outpace.decoder import Decoder
from outpace.draft.base import Drafter
from outpace.engine.request import checked_seed, per_prompt, seed_of
from outpace.engine.sequence import Output, SequenceState
from outpace.engine.stats import Stats
from outpace.integrations.assisted import patch, patched, unpatch
from outpace.integrations.pool import DecoderPool
from outpace.integrations.processors import samplings
from outpace.integrations.sources import detect_silence, encoded
from outpace.models.encoder import EncoderScorer
from outpace.models.scorer import Scorer
from outpace.policy import DraftLengthPolicy
from outpace.policy.resolve import repeatable
from outpace.verification import Rule

__all__ = ["Generation", "forget", "generate", "patch", "patched", "unpatch"]

_decoders = DecoderPool()


@dataclass
class Generation(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The output with ``return_dict_in_generate=True``: the fields of Transformers' output, and statistics.

    Attributes:
        stats: The sum of the ``Stats`` of all sequences.
    """

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
    num_draft_tokens: DraftLengthPolicy | int | str | None = None,
    seed: int | Sequence[int] | None = None,
    stats: Stats | None = None,
    decoder: Decoder | None = None,
    streamer: Any = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor | Generation | GenerateEncoderDecoderOutput:
    """Decode speculatively for ``model.generate(..., custom_generate=outpace.generate, draft=...)``.

    Everything else works as in Transformers. See docs/guides/transformers.md.

    Args:
        model: The target. Transformers passes it.
        input_ids: The prompts. Transformers passes them.
        logits_processor: The logits processors. Transformers passes them.
        stopping_criteria: The stopping criteria. Transformers passes them.
        generation_config: The generation config. Transformers passes it.
        draft: A smaller model with the same tokenizer, a ``Drafter``, or "lookup".
        rule: As in ``Decoder``, but "token" by default, with a seed, too.
        lenience: As in ``Decoder``.
        num_draft_tokens: As in ``Decoder``, with one exception: sampling uses a ``Heuristic`` by default, so
            that runs can be repeated.
        seed: An int, or one per prompt. None takes seeds from PyTorch's generator, so ``torch.manual_seed``
            makes a run repeatable.
        stats: A ``Stats`` to which this call adds its own.
        decoder: A ``Decoder`` of this model, used instead of ``draft``, ``rule``, ``lenience`` and
            ``num_draft_tokens``. Later calls reuse its KV caches and captured graphs.
        streamer: A streamer is usually passed to ``model.generate``. This argument is for
            ``functools.partial(outpace.generate, streamer=...)``.
        inputs_tensor: The encoder's input. Transformers passes it.
        **model_kwargs: Further arguments of the model. Transformers passes them.

    Returns:
        The sequences ``[R, longest]``, or an output object with ``return_dict_in_generate=True``.
    """
    withheld = _withheld_arguments(model)
    if decoder is None:
        _check_draft(draft, withheld.get("assistant_model"))
    else:
        _check_decoder(decoder, model, draft)
    _refuse_other_modes(generation_config, withheld.get("synced_gpus"))
    encoder_inputs = encoded(model, inputs_tensor, model_kwargs, len(input_ids))
    prompts = _prompts(input_ids, model_kwargs)
    logits_processor = detect_silence(model, logits_processor, input_ids, encoder_inputs)
    streamer = _streamer(streamer, withheld.get("streamer"), input_ids)
    with contextlib.ExitStack() as pooled:
        if decoder is None:
            # Decoders of encoder-decoder models are not kept, so graphs would be captured at every call
            engine = False if model.config.is_encoder_decoder else None
            create = functools.partial(Decoder, model, draft, rule=rule, lenience=lenience, engine=engine)
            decoder = pooled.enter_context(_decoders.lend(model, draft, (f"{rule}", lenience), create))
            context = decoder.scorer.context
            if num_draft_tokens is None and generation_config.do_sample and f"{rule}" != "match":
                # In Transformers the same seed gives the same text. A policy that measures time would not.
                free = decoder.drafter is not None and decoder.drafter.free
                num_draft_tokens = repeatable(context - 1, free, decoder.uses_graphs)
            decoder.set_policy(num_draft_tokens)
        scorer = decoder.scorer
        decoder_prompts: Any = prompts
        if isinstance(scorer, EncoderScorer):  # its encoder has run already
            decoder_prompts = [
                one.source(prompt, scorer) for one, prompt in zip(encoder_inputs, prompts, strict=True)
            ]
        stops = _Stops(stopping_criteria, input_ids, generation_config, scorer)
        return_dict = bool(generation_config.return_dict_in_generate)
        steps = decoder.stream(
            decoder_prompts,
            samplings(logits_processor, bool(generation_config.do_sample), input_ids, prompts, scorer.device),
            max_new_tokens=stops.max_new_tokens,
            stop_tokens=stops.tokens,
            ignore_eos=True,  # stop_tokens has the end-of-text tokens of the criteria
            stop_when=stops.should_stop if stops.others else None,
            seed=_seeds(seed, len(prompts), generation_config.num_return_sequences or 1),
            scores=return_dict and bool(generation_config.output_scores),
            logits=return_dict and bool(generation_config.output_logits),
        )
        outputs: dict[int, Output] = {}
        with contextlib.closing(steps):
            for step in steps:
                if streamer is not None and step.token_ids:
                    streamer.put(torch.tensor(step.token_ids))
                if step.output is not None:
                    if step.output.error is not None:
                        raise ValueError(f"row {step.index}: {step.output.error}") from step.output.error
                    outputs[step.index] = step.output
    if streamer is not None:
        streamer.end()
    rows = [outputs[i] for i in range(len(prompts))]
    total = sum((row.stats for row in rows), Stats())
    if stats is not None:
        vars(stats).update(vars(stats + total))
    sequences = stops.sequences(rows)
    if not return_dict:
        return sequences
    scores, logits = (
        _by_position(per_row, input_ids.device)
        for per_row in ([row.scores for row in rows], [row.logits for row in rows])
    )
    if encoder_inputs:
        return GenerateEncoderDecoderOutput(sequences=sequences, scores=scores, logits=logits)
    return Generation(sequences=sequences, scores=scores, logits=logits, stats=total)


def forget() -> None:
    """Free what is kept between calls: KV caches, with the prompts and outputs in them, and CUDA graphs."""
    _decoders.clear()


# Arguments


WITHHELD = ("streamer", "assistant_model", "synced_gpus")
"""Arguments of Transformers' ``generate`` that it does not pass on to a callable."""
CHECKED_VERSIONS = "5.17.0 and 5.23.0"
"""Versions of Transformers with which ``_withheld_arguments`` was tested."""


def _withheld_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments that Transformers' ``generate`` got and does not pass on to a callable.

    Transformers has no public access to them. ``generate`` passes a callable those of its ``**kwargs`` that
    the callable names. These three are named arguments of ``generate`` itself. Without them a streamer would
    get the prompt and never end. An assistant would be ignored, and synchronized processes would wait for
    each other. So this function reads them from the frame of the calling ``generate``. It was tested with
    ``CHECKED_VERSIONS``. A direct caller of ``outpace.generate`` has no such frame, and the result is empty.
    """
    frame = sys._getframe()
    while frame is not None:
        is_transformers = frame.f_globals.get("__name__") == GenerationMixin.__module__
        arguments = frame.f_locals if is_transformers else {}
        if arguments.get("self") is model:
            missing = [name for name in WITHHELD if name not in arguments]
            if missing:
                raise RuntimeError(
                    f"{missing[0]}: outpace cannot read this argument of generate in Transformers "
                    f"{transformers.__version__}; use one of {CHECKED_VERSIONS}"
                )
            return {name: arguments[name] for name in WITHHELD}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _check_decoder(decoder: Any, model: Any, draft: Any) -> None:
    if not isinstance(decoder, Decoder) or decoder.scorer.model is not model:
        got = "a Decoder of another model" if isinstance(decoder, Decoder) else kind(decoder)[:80]
        raise ValueError(f"decoder: got {got}; it must be a Decoder whose target is the model that generates")
    if draft is not None:
        raise ValueError("draft: got it together with decoder, which has its own; pass one or the other")


def _check_draft(draft: Any, assistant_model: Any) -> None:
    valid = 'a smaller model, a Drafter such as outpace.LookupDrafter(), or "lookup"'
    if assistant_model is not None:
        raise ValueError(
            f"assistant_model: got {type(assistant_model).__name__}; it must be None with custom_generate; "
            "pass the model as draft= instead"
        )
    if draft is None:
        raise ValueError(f"draft: got None; it must be {valid}")
    if isinstance(draft, str):
        if draft != "lookup":
            raise ValueError(f"draft: got {draft!r}; it must be {valid}{suggestion(draft, ['lookup'])}")
    elif isinstance(draft, type):
        raise TypeError(f"draft: got the class {draft.__name__}; it must be {valid}")
    elif not (isinstance(draft, torch.nn.Module) or hasattr(draft, "propose")):
        raise TypeError(f"draft: got {kind(draft)[:80]}; it must be {valid}")


_MODES = {  # settings that choose another generation mode, and their neutral values
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("constraints", "force_words_ids", "penalty_alpha", "dola_layers")),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit")),
    "use_mtp": False,
}


def _refuse_other_modes(config: Any, synced_gpus: bool | None) -> None:
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        settings = [name for name, off in _MODES.items() if getattr(config, name, None) not in (None, off)]
        values = ", ".join(f"{getattr(config, name)!r}"[:80] for name in settings)
        hint = '; pass the drafter as draft=, for prompt lookup draft="lookup"'
        raise ValueError(
            f"{', '.join(settings)}: got {values}, which selects {mode.value.replace('_', ' ')}; outpace "
            f"supports only greedy search and sampling{hint if mode == 'assisted_generation' else ''}"
        )
    if synced_gpus:
        raise ValueError("synced_gpus: got True; it must be False, because outpace runs in one process")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"{name}: got True; it must be False: outpace returns only scores and logits")


_UNUSED = {"use_cache", "logits_to_keep", "cache_position"}  # the scorer sets these itself


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each row without padding."""
    arguments = {name: value for name, value in model_kwargs.items() if value is not None}
    mask, positions = arguments.pop("attention_mask", None), arguments.pop("position_ids", None)
    if "encoder_outputs" in arguments:  # then mask and positions belong to the encoder's input
        mask = arguments.pop("decoder_attention_mask", None)
        positions = arguments.pop("decoder_position_ids", None)
        del arguments["encoder_outputs"]
    past = arguments.pop("past_key_values", None)
    unknown = sorted(arguments.keys() - _UNUSED)
    if unknown:
        raise ValueError(
            f"{unknown[0]}: got a value; it must be left out: outpace passes only token ids to the model"
        )
    if past is not None and past.get_seq_length():
        raise ValueError(
            "past_key_values: got a cache that is not empty; it must be empty or None: outpace keeps its own "
            "KV cache between calls; pass the whole text as input_ids"
        )
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    if real.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: got shape {tuple(real.shape)}; it must be the shape of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    if not real[:, -1:].all():
        raise ValueError(
            "attention_mask: got 0 for the last token of a row; it must be 1: pad on the left "
            "(tokenizer.padding_side)"
        )
    if positions is not None:
        expected = real.long().cumsum(-1) - 1
        if positions.shape[-1] != expected.shape[-1] or (
            ((positions.to(expected.device) != expected) & real).any()
        ):
            raise ValueError(
                "position_ids: got other positions than 0, 1, 2, ... for the tokens of a row; leave it out"
            )
    return [row[mask_row].tolist() for row, mask_row in zip(input_ids, real, strict=True)]


def _streamer(own: Any, withheld: Any, input_ids: Tensor) -> Any:
    """Return the streamer, with the prompt put into it.

    Args:
        own: The streamer that was passed to ``outpace.generate``.
        withheld: The streamer that was passed to Transformers' ``generate``.
        input_ids: The prompts.
    """
    streamer = withheld if own is None else own
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"streamer: got it with {len(input_ids)} rows; a streamer supports only one row")
    if own is not None and own is not withheld:  # Transformers puts the prompt into its own streamer
        own.put(input_ids.cpu())
    return streamer


def _seeds(seed: int | Sequence[int] | None, rows: int, samples: int) -> list[int] | None:
    if seed is None:
        return None
    seeds = per_prompt("seed", seed, rows // samples, checked_seed, "one int")
    return [seed_of(seeds(row // samples), row % samples) for row in range(rows)]


# Stopping criteria and outputs


class _Stops:
    """The stopping criteria of a call, and the sequences as the criteria see them: padded, prompt included.

    The decoder itself handles lengths and end-of-text tokens. The other criteria are evaluated after each
    token of each sequence. So a criterion that is true among accepted draft tokens ends the sequence there.
    """

    def __init__(self, criteria: Sequence[Any], input_ids: Tensor, config: Any, scorer: Scorer) -> None:
        rows, self._width = input_ids.shape
        handled = (MaxLengthCriteria, EosTokenCriteria)
        self.others = StoppingCriteriaList([one for one in criteria if type(one) not in handled])
        lengths = [one.max_length - self._width for one in criteria if type(one) is MaxLengthCriteria]
        self.max_new_tokens: int = max(1, min([*lengths, scorer.context]))
        ends = [one.eos_token_id.tolist() for one in criteria if type(one) is EosTokenCriteria]
        self.tokens = sorted({token for ids in ends for token in ids if 0 <= token < scorer.vocab_size})
        pad = config._pad_token_tensor
        early = self.tokens or self.others or self._width + self.max_new_tokens > scorer.context
        if pad is None and rows > 1 and early:
            raise ValueError("pad_token_id: got None; it must be a token id, to pad rows that end early")
        shape = (rows, self._width + self.max_new_tokens)
        self._ids = input_ids.new_full(shape, 0 if pad is None else int(pad))
        self._ids[:, : self._width] = input_ids

    def should_stop(self, row: SequenceState) -> bool:
        """Return whether a criterion ends a sequence after its last token."""
        length = self._width + row.stats.new_tokens
        self._ids[row.index, length - 1] = row.tokens[-1]
        scores = None
        if row.scores is not None:
            scores = tuple(one[None].to(self._ids.device) for one in row.scores[: row.stats.new_tokens])
        return bool(self.others(self._ids[row.index, :length][None], scores).any())

    def sequences(self, rows: Sequence[Output]) -> Tensor:
        """Return the sequences ``[R, longest]``, padded on the right."""
        for ids, row in zip(self._ids, rows, strict=True):
            ids[self._width : self._width + len(row.token_ids)] = torch.tensor(row.token_ids)
        return self._ids[:, : self._width + max(len(row.token_ids) for row in rows)].clone()


def _by_position(rows: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, ...] | None:
    """Return ``[R, V]`` for each position, with zeros where a sequence has ended."""
    present = [row for row in rows if row is not None]
    return tuple(torch.nn.utils.rnn.pad_sequence(present).to(device)) if present else None
