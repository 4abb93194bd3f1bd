"""Measures of text quality, as papers report them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from outpace.checks.errors import import_extra

Normal = Callable[[str], str]


def normal_form(tokenizer: Any, language: str | None) -> Normal:
    """Return Whisper's own function that brings a transcript to normal form.

    English gets uniform spellings and numbers. Other languages lose case and punctuation.

    Args:
        tokenizer: Whisper's tokenizer, which has the English spellings.
        language: Name or code of the language; None is English.
    """
    from transformers.models.whisper import english_normalizer as normalizers

    if language is not None and language.lower() not in ("en", "english"):
        other: Normal = normalizers.BasicTextNormalizer()
        return other
    spellings = getattr(tokenizer, "english_spelling_normalizer", None) or {}
    english: Normal = normalizers.EnglishTextNormalizer(spellings)
    return english


def word_errors(reference: str, text: str, normal: Normal) -> dict[str, float]:
    """Return the numbers of word errors and of reference words, with both texts in normal form.

    Errors are substitutions, deletions and insertions.

    Raises:
        ValueError: The reference holds no words.
    """
    jiwer = import_extra("jiwer", "tasks")
    expected, found = normal(reference), normal(text)
    if not expected:
        raise ValueError("the transcript holds no words")
    counts = jiwer.process_words(expected, found)
    errors = counts.substitutions + counts.deletions + counts.insertions
    return {"errors": errors, "words": len(expected.split())}


def rouge(reference: str, text: str) -> dict[str, float]:
    """Return the F-measures of ROUGE-1, ROUGE-2 and ROUGE-L with stemming, in percent."""
    scores = _rouge().score(reference, text)
    return {name: 100 * scores[key].fmeasure for name, key in zip(ROUGE, ROUGE_KEYS, strict=True)}


ROUGE = ("ROUGE-1", "ROUGE-2", "ROUGE-L")
ROUGE_KEYS = ("rouge1", "rouge2", "rougeL")


@functools.cache
def _rouge() -> Any:
    import_extra("rouge_score", "tasks")
    scorer = import_extra("rouge_score.rouge_scorer", "tasks")
    return scorer.RougeScorer(list(ROUGE_KEYS), use_stemmer=True)


def bleu(references: Sequence[str], texts: Sequence[str]) -> float:
    """Return sacreBLEU of all texts together."""
    return float(import_extra("sacrebleu", "tasks").corpus_bleu(list(texts), [list(references)]).score)


def pass_at(k: int, samples: int, passed: int) -> float:
    """Return pass@k: the probability that one of k programs passes, if c of n samples did.

    It is 1 − C(n − c, k)/C(n, k).

    Args:
        k: Number of programs.
        samples: Number of samples, n.
        passed: Number of samples that passed, c.

    Raises:
        ValueError: There are fewer than k samples, or the numbers do not fit.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"k, samples, passed: got {k}, {samples}, {passed}; pass@k needs k of n programs")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
