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
RUNNERS = ("baseline", "assisted", "exact", "sigmoid")  # names
LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fi": "Finnish", "fr": "French",
    "hi": "Hindi", "it": "Italian", "ja": "Japanese", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese",
    "ro": "Romanian", "ru": "Russian", "tr": "Turkish", "uk": "Ukrainian", "zh": "Chinese",
}  # fmt: skip


@dataclass(frozen=True)
class EvalTask:
    """A task: how to ask a model, and how to judge its answers.

    Attributes:
        name: Name of the task on the command line.
        chat: Prompt for a model with a chat template; ``{source}`` stands for the row's text.
        bare: Prompt for a model without a chat template.
        encoder: Prompt for an encoder, by model family; the key ``""`` is for all other families.
        max_new_tokens: Maximum number of tokens of an answer.
        scale: Scale ± of the sigmoid rule, as in the paper of Wagner et al. for such a task.
        stop: Strings that end the answer of a model without a chat template.
        judge: Function that scores one answer: numbers, and a ``"reason"`` where it failed. Speech is
            compared in normal form.
        overall: Function that returns the printed measures of all answers.
        row_problem: Function that returns why a row cannot be judged; None if it can.
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
    row_problem: Callable[[Item], str | None] = lambda item: None


def task_of(name: str, languages: tuple[str, str] = ("en", "de")) -> EvalTask:
    """Return a task by its name.

    Args:
        name: A key of ``TASKS``.
        languages: Codes of the source and the target language of a translation.

    Raises:
        ValueError: There is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"task: got {name!r}; there are {', '.join(TASKS)}")
    task = TASKS[name]
    if name != "translate":
        return task
    source, target = (LANGUAGES.get(code, code) for code in languages)

    def filled(text: str) -> str:
        return text.replace("{from}", source).replace("{to}", target)

    encoder = {family: filled(text) for family, text in task.encoder.items()}
    return EvalTask(
        **{**vars(task), "chat": filled(task.chat), "bare": filled(task.bare), "encoder": encoder}
    )


def runner_problem(name: str, has_drafter: bool, greedy: bool) -> str | None:
    """Return why a runner is impossible, as far as that is known without models; None if it is possible.

    Args:
        name: One of ``RUNNERS``.
        has_drafter: Whether there is a drafter.
        greedy: Whether decoding is greedy.
    """
    if name != "baseline" and not has_drafter:
        return "there is no drafter"
    if name == "sigmoid" and greedy:
        return "greedy decoding is always exact; give a temperature"
    return None


# Requirements of rows, which are checked before any text is generated


def summary_problem(item: Item) -> str | None:
    """Return why a row cannot be judged as a summary; None if it can."""
    return None if item.reference else "there is no summary to compare with"


def translation_problem(item: Item) -> str | None:
    """Return why a row cannot be judged as a translation; None if it can."""
    return None if item.reference else "there is no translation to compare with"


def tests_problem(item: Item) -> str | None:
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


def no_scores(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return no scores, where answers are not judged one by one."""
    return {}


def score_transcript(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return the word errors of a transcript."""
    return score.word_errors(item.reference or "", text, normal)


def score_summary(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return the ROUGE scores of a summary."""
    assert item.reference is not None
    return score.rouge(item.reference, text)


def score_program(item: Item, text: str, normal: score.Normal) -> Judged:
    """Return whether a program passes the row's tests in the sandbox, and why not."""
    from outpace.tasks import sandbox

    result = sandbox.run(program(item, text))
    return {"passed": result.passed, "reason": result.reason, "stopped": result.stopped}


def program(item: Item, answer: str) -> str:
    """Return an answer as a program that fails unless the row's tests pass.

    The answer may be the whole function, or only the rest of it after the prompt. It may stand in a block of
    code, or by itself.
    """
    prompt, entry = item.turns[0], item.extra["entry_point"]
    before, blocks = split_code(answer)
    code = next((block for block in blocks if f"def {entry}" in block), blocks[0] if blocks else before)
    if before.strip() and before.lstrip("\n")[:1].isspace():
        code = before  # the rest of the function, with an explanation behind it
    if re.search(rf"^def {re.escape(entry)}\b", code, re.MULTILINE):
        # Imports and helpers stand before the function in the row's text.
        position = prompt.rfind(f"def {entry}")
        source = f"{prompt[: max(position, 0)]}\n{code}"
    else:
        source = prompt + code
    return f"{source}\n\n{item.extra['test']}\n\ncheck({entry})\n"


def split_code(answer: str) -> tuple[str, list[str]]:
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
    samples = [sample for row in judged for sample in row]
    errors, words = (sum(sample[name] for sample in samples) for name in ("errors", "words"))
    return {"WER %": 100 * errors / words}


def mean_rouge(
    items: Sequence[Item], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Judged]]
) -> dict[str, float]:
    """Return the mean ROUGE scores."""
    samples = [sample for row in judged for sample in row]
    return {name: statistics.fmean(sample[name] for sample in samples) for name in score.ROUGE}


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
    rates = {}
    for k in (1, 10, 100):
        if k <= samples:
            per_row = [score.pass_at(k, len(row), sum(sample["passed"] for sample in row)) for row in judged]
            rates[f"pass@{k} %"] = 100 * statistics.fmean(per_row)
    return rates


TASKS = {
    task.name: task
    for task in (
        EvalTask("asr", "", "", {}, 444, 1e3, (), score_transcript, word_error_rate),
        EvalTask(
            "summarize",
            "Summarize the following text in a few sentences.\n\n{source}",
            "{source}\nSummary:",
            {"t5": "summarize: {source}", "": "{source}"},
            100,
            1e4,
            ("\n\n",),
            score_summary,
            mean_rouge,
            summary_problem,
        ),
        EvalTask(
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
            no_scores,
            corpus_bleu,
            translation_problem,
        ),
        EvalTask(
            "code",
            "Complete this Python function. Answer with the whole function in one block of code.\n\n"
            "```python\n{source}\n```",
            "{source}",
            {"": "{source}"},
            384,
            1e4,
            ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\nassert ", "\n@"),
            score_program,
            pass_rates,
            tests_problem,
        ),
        EvalTask("specbench", "{source}", "{source}", {"": "{source}"}, 256, 1e4, (), no_scores, no_measure),
        EvalTask("dialog", "{source}", "{source}", {"": "{source}"}, 128, 1e4, (), no_scores, no_measure),
    )
}
