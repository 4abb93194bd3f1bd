"""Vocabularies by the models that have them."""

from __future__ import annotations

from dataclasses import dataclass

SPEECH, TEXT = 1000, 10000  # beta of Wagner et al. 2024, whose alpha is −beta


@dataclass(frozen=True)
class Vocabulary:
    """Size of the vocabulary of a family of models, and the scale of its sigmoid rule."""

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
    """Return the known vocabulary of this size, or else one that is named by its size."""
    return next((one for one in VOCABULARIES if one.V == V), Vocabulary(str(V), V))
