"""Vocabularies by the models that have them."""

from __future__ import annotations

from dataclasses import dataclass

SPEECH, TEXT = 1000, 10000  # beta of Wagner et al. 2024, whose alpha is −beta


@dataclass(frozen=True)
class Vocabulary:
    """How many tokens a family of models has, and the scale that its sigmoids are given."""

    name: str
    V: int
    scale: float = TEXT


VOCABULARIES = (
    Vocabulary("Llama 2", 32000),
    Vocabulary("Whisper", 51865, SPEECH),
    Vocabulary("Llama 3", 128256),
    Vocabulary("Qwen", 151936),
    Vocabulary("Gemma", 256000),
)


def of_size(V: int) -> Vocabulary:
    """The one that is known by its size, or one without a name."""
    return next((one for one in VOCABULARIES if one.V == V), Vocabulary(str(V), V))
