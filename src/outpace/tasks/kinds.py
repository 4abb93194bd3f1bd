"""The tasks: what is asked of a model, and what its answers are worth."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.tasks import score
from outpace.tasks.items import Item

Judged = dict[str, Any]
SIDES = ("plain", "baseline", "exact", "sigmoid")
LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fi": "Finnish", "fr": "French",
    "hi": "Hindi", "it": "Italian", "ja": "Japanese", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese",
    "ro": "Romanian", "ru": "Russian", "tr": "Turkish", "uk": "Ukrainian", "zh": "Chinese",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What is asked, and how answers are judged.

    chat            what a model with a chat template is told; {source} is the row's text
    bare            what one without goes on from
    encoder         what an encoder reads, by the model's family; "" is for all others
    max_new_tokens  of an answer
    scale           of the sigmoid column, ±, as Wagner has it for such a task
    stop            strings that end the answer of a model without a chat template
    judge           of an answer to a row: numbers, and a "reason" where it failed; speech is compared in
                    normal form
    overall         measures of all answers: what is printed
    lacking         what a row must have to be judged and has not, in words; None if it has all
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
    """A task by its name; for a translation, from which language into which."""
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
    """Return why there cannot be a side, as far as can be told without models; None if nothing is known.

    Args:
        name: One of `SIDES`.
        drafted: Whether there is a drafter.
        greedy: Whether the likeliest token is always taken.
    """
    if name != "plain" and not drafted:
        return "nobody drafts"
    if name == "sigmoid" and greedy:
        return "where the likeliest token is taken it is exact; give a temperature"
    return None


# What rows must have. It is looked for before anything is generated for them.


def no_summary(item: Item) -> str | None:
    return None if item.reference else "there is no summary to compare with"


def no_translation(item: Item) -> str | None:
    return None if item.reference else "there is no translation to compare with"


def no_tests(item: Item) -> str | None:
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
    """Where rows have no reference."""
    return {}


def heard(item: Item, text: str, normal: score.Normal) -> Judged:
    return score.word_errors(item.reference or "", text, normal)


def summed_up(item: Item, text: str, normal: score.Normal) -> Judged:
    assert item.reference is not None
    return score.rouge(item.reference, text)


def programmed(item: Item, text: str, normal: score.Normal) -> Judged:
    from outpace.tasks import sandbox

    verdict = sandbox.run(program(item, text))
    return {"passed": verdict.passed, "reason": verdict.reason, "stopped": verdict.stopped}


def program(item: Item, answer: str) -> str:
    """An answer as a program that fails unless the row's tests pass: the function as a whole, or what comes
    after its beginning; in a block of code, or by itself."""
    beginning, entry = item.turns[0], item.extra["entry_point"]
    before, blocks = code_in(answer)
    code = next((one for one in blocks if f"def {entry}" in one), blocks[0] if blocks else before)
    if before.strip() and before.lstrip("\n")[:1].isspace():
        code = before  # it goes on with the function, and says something about it afterwards
    if re.search(rf"^def {re.escape(entry)}\b", code, re.MULTILINE):
        # Imports and helpers stand before the function in the row's text.
        place = beginning.rfind(f"def {entry}")
        whole = f"{beginning[: max(place, 0)]}\n{code}"
    else:
        whole = beginning + code
    return f"{whole}\n\n{item.extra['test']}\n\ncheck({entry})\n"


def code_in(answer: str) -> tuple[str, list[str]]:
    """What stands before the first fence, and the blocks between fences; the last may have no end."""
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
    return {}


def word_error_rate(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    every = [one for row in judged for one in row]
    return {"WER %": 100 * sum(one["errors"] for one in every) / sum(one["words"] for one in every)}


def mean_rouge(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    every = [one for row in judged for one in row]
    return {name: statistics.fmean(one[name] for one in every) for name in score.ROUGE}


def corpus_bleu(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    pairs = [(str(item.reference), text) for item, row in zip(items, texts, strict=True) for text in row]
    return {"BLEU": score.bleu(*zip(*pairs, strict=True))}


def pass_rates(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
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
