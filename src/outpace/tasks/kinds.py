"""The tasks: prompts for a model, and scores for its answers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.bench.data import Item
from outpace.tasks import score

Judged = dict[str, Any]
SIDES = ("plain", "baseline", "exact", "sigmoid")
LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fi": "Finnish", "fr": "French",
    "hi": "Hindi", "it": "Italian", "ja": "Japanese", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese",
    "ro": "Romanian", "ru": "Russian", "tr": "Turkish", "uk": "Ukrainian", "zh": "Chinese",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A task: how to ask a model, and how to judge its answers.

    Attributes:
        name: Name of the task on the command line.
        chat: Prompt for a model with a chat template; ``{source}`` stands for the row's text.
        bare: Prompt for a model without a chat template.
        encoder: Prompt for an encoder, by model family; the key ``""`` is for all other families.
        max_new_tokens: Maximum number of tokens of an answer.
        scale: Scale of the sigmoid column, ±, as Wagner et al. have it for such a task.
        stop: Strings that end the answer of a model without a chat template.
        judge: Function that scores one answer: numbers, and a ``"reason"`` where it failed. Speech is
            compared in normal form.
        overall: Function that returns the printed measures of all answers.
        lacking: Function that says what a row lacks to be judged; None if it has everything.
    """

    name: str
    chat: str
    bare: str
    encoder: dict[str, str]
    max_new_tokens: int
    scale: float
    stop: tuple[str, ...]
    judge: Callable[[Item, str, score.Normal], Judged]
    overall: Callable[[Sequence[Item], Sequence[Sequence[str]], Sequence[Sequence[Judged]]], dict[str, float]]
    lacking: Callable[[Item], str | None] = lambda item: None


def task_of(name: str, languages: tuple[str, str] = ("en", "de")) -> Task:
    """Return a task by its name.

    Args:
        name: A key of ``TASKS``.
        languages: Codes of the source and the target language of a translation.

    Raises:
        ValueError: There is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"task: got {name!r}; there are {', '.join(TASKS)}")
    one = TASKS[name]
    if name != "translate":
        return one
    source, target = (LANGUAGES.get(code, code) for code in languages)

    def told(text: str) -> str:
        return text.replace("{from}", source).replace("{to}", target)

    asked = {family: told(text) for family, text in one.encoder.items()}
    return Task(**{**vars(one), "chat": told(one.chat), "bare": told(one.bare), "encoder": asked})


def no_side(name: str, drafted: bool, greedy: bool) -> str | None:
    """Return why a runner is impossible, as far as that is known without models; None otherwise.

    Args:
        name: One of ``SIDES``.
        drafted: Whether there is a drafter.
        greedy: Whether decoding is greedy.
    """
    if name != "plain" and not drafted:
        return "nobody drafts"
    if name == "sigmoid" and greedy:
        return "where the likeliest token is taken it is exact; give a temperature"
    return None


# Requirements of rows, which are checked before anything is generated for them.


def no_summary(item: Item) -> str | None:
    """Return why a row cannot be judged as a summary; None if it can."""
    return None if item.reference else "there is no summary to compare with"


def no_translation(item: Item) -> str | None:
    """Return why a row cannot be judged as a translation; None if it can."""
    return None if item.reference else "there is no translation to compare with"


def no_tests(item: Item) -> str | None:
    """Return why a row cannot be judged as a program; None if it can."""
    test, entry = item.extra.get("test"), item.extra.get("entry_point")
    if not isinstance(entry, str) or not entry.isidentifier():
        return "there is no entry_point, the name of the function to test"
    if not isinstance(test, str) or not test.strip():
        return "there is no test to run the program with"
    if re.search(r"^def check\b", test, re.MULTILINE) is None:
        return "the test defines no function check, which is called with the program's function"
    return None


# Judges


def nothing(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return no scores, where answers are not judged one by one."""
    return {}


def heard(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return the word errors of a transcript."""
    return score.word_errors(item.reference or "", text, normal)


def summed_up(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return the ROUGE scores of a summary."""
    assert item.reference is not None
    return score.rouge(item.reference, text)


def programmed(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return whether a program passes the row's tests in the sandbox, and why not."""
    from outpace.tasks import sandbox

    verdict = sandbox.run(program(item, text))
    return {"passed": verdict.passed, "reason": verdict.reason, "stopped": verdict.stopped}


def program(item: Item, answer: str) -> str:
    """Return an answer as a program that fails unless the row's tests pass.

    The answer may be the whole function, or only the rest of it after the prompt. It may stand in a block of
    code, or by itself.
    """
    beginning, entry = item.turns[0], item.extra["entry_point"]
    before, blocks = code_in(answer)
    code = next((one for one in blocks if f"def {entry}" in one), blocks[0] if blocks else before)
    if before.strip() and before.lstrip("\n")[:1].isspace():
        code = before  # the rest of the function, with an explanation behind it
    if re.search(rf"^def {re.escape(entry)}\b", code, re.MULTILINE):
        # Imports and helpers stand before the function in the row's text.
        place = beginning.rfind(f"def {entry}")
        whole = f"{beginning[: max(place, 0)]}\n{code}"
    else:
        whole = beginning + code
    return f"{whole}\n\n{item.extra['test']}\n\ncheck({entry})\n"


def code_in(answer: str) -> tuple[str, list[str]]:
    """Return the text before the first fence, and the blocks of code between fences.

    The last block may have no closing fence.
    """
    before: list[str] = []
    blocks: list[list[str]] = []
    inside = False
    for line in answer.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line)
        elif not blocks:
            before.append(line)
    return "\n".join(before), ["\n".join(block) for block in blocks]


# Measures of all answers


def no_measure(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    """Return no measures, for a task without references."""
    return {}


def word_error_rate(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    """Return the word error rate over all words, in percent."""
    every = [one for row in judged for one in row]
    return {"WER %": 100 * sum(one["errors"] for one in every) / sum(one["words"] for one in every)}


def mean_rouge(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    """Return the mean ROUGE scores."""
    every = [one for row in judged for one in row]
    return {name: statistics.fmean(one[name] for one in every) for name in score.ROUGE}


def corpus_bleu(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    """Return BLEU of all answers together."""
    pairs = [(str(item.reference), text) for item, row in zip(items, texts, strict=True) for text in row]
    return {"BLEU": score.bleu(*zip(*pairs, strict=True))}


def pass_rates(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    """Return pass@k in percent, for each k of 1, 10 and 100 that there are enough samples for."""
    samples = min(map(len, judged))
    found = {}
    for k in (1, 10, 100):
        if k <= samples:
            each = [score.pass_at(k, len(row), sum(one["passed"] for one in row)) for row in judged]
            found[f"pass@{k} %"] = 100 * statistics.fmean(each)
    return found


TASKS = {
    one.name: one
    for one in (
        Task("asr", "", "", {}, 444, 1e3, (), heard, word_error_rate),
        Task(
            "summarize",
            "Summarize the following text in a few sentences.\n\n{source}",
            "{source}\nSummary:",
            {"t5": "summarize: {source}", "": "{source}"},
            100,
            1e4,
            ("\n\n",),
            summed_up,
            mean_rouge,
            no_summary,
        ),
        Task(
            "translate",
            "Translate this text from {from} to {to}. Answer with the translation alone.\n\n{source}",
            "{from}: {source}\n{to}:",
            {
                "t5": "translate {from} to {to}: {source}",
                "mt5": "translate {from} to {to}: {source}",
                "": "{source}",
            },
            128,
            1e4,
            ("\n",),
            nothing,
            corpus_bleu,
            no_translation,
        ),
        Task(
            "code",
            "Complete this Python function. Answer with the whole function in one block of code.\n\n"
            "```python\n{source}\n```",
            "{source}",
            {"": "{source}"},
            384,
            1e4,
            ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\nassert ", "\n@"),
            programmed,
            pass_rates,
            no_tests,
        ),
        Task("specbench", "{source}", "{source}", {"": "{source}"}, 256, 1e4, (), nothing, no_measure),
        Task("dialog", "{source}", "{source}", {"": "{source}"}, 128, 1e4, (), nothing, no_measure),
    )
}
