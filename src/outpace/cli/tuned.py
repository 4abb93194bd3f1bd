"""The results of ``outpace tune``: in the terminal, and in files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.checks.errors import counted
from outpace.checks.files import write_atomic
from outpace.cli import tables
from outpace.cli.show import screen
from outpace.draft.text import TextDrafter
from outpace.models.default import DEFAULT
from outpace.report.columns import tune_columns
from outpace.tune import config, export
from outpace.tune.candidate import NGRAM, NONE
from outpace.tune.tuning import Tuning

Content = Mapping[str, Any]
OTHER_LIBRARIES = {"transformers": "Transformers", "vllm": "vLLM"}


@dataclass(frozen=True)
class ModelNames:
    """The names of models, as the user wrote them.

    Attributes:
        target: Name of the target.
        drafts: Name of each draft, by its name in tables.
        table: File of a fitted n-gram table.
        device: Device of the models.
        revision: Revision of the target on the hub.
    """

    target: str
    drafts: Mapping[str, str]
    table: Path
    device: str
    revision: str | None = None

    @property
    def in_configuration(self) -> str | None:
        """The target's name that works from any folder; None for the default model, which has no name."""
        name = absolute_name(self.target)
        return None if name == DEFAULT else name

    def draft(self, shown: str) -> str:
        """Return a draft's name that works from any folder.

        A fitted n-gram table is named relative to the configuration.
        """
        if shown == NGRAM:
            return f"ngram:{self.table.name}"
        return absolute_name(self.drafts.get(shown, shown))

    def in_other_libraries(self, shown: str | None = None) -> str:
        """Return the name of a draft, or of the target, for Transformers and vLLM."""
        if shown == NGRAM:
            return f"ngram:{self.table.absolute()}"
        name = absolute_name(self.target) if shown is None else self.draft(shown)
        return f"HuggingFaceTB/{DEFAULT}" if name == DEFAULT else name


def absolute_name(name: str) -> str:
    """Return a name that means the same in any folder."""
    kind, colon, path = name.partition(":")
    if colon and kind == NGRAM:
        return f"ngram:{Path(path).expanduser().absolute()}"
    local = Path(name).expanduser()
    return str(local.absolute()) if local.exists() and name not in ("lookup", "none") else name


def save(tuning: Tuning, names: ModelNames, out: Path | None) -> None:
    """Save the results, and if ``out`` is a file, the configuration and its n-gram table.

    Without a choice, no settings of other libraries are saved either.

    Args:
        tuning: The tuning.
        names: Names of the models.
        out: File of the configuration; None writes none.
    """
    findings, content = tuning.findings, tuning.results.content
    chosen, fixed = findings.chosen(), findings.nearest_fixed()
    num_draft_tokens: int | str | None = chosen.num_draft_tokens
    if findings.recommendation.candidate.is_baseline:
        num_draft_tokens = None
    elif chosen.num_draft_tokens.isdecimal():
        num_draft_tokens = int(chosen.num_draft_tokens)
    speedup = findings.record.speedup(findings.recommendation.candidate)
    text = config.to_toml(
        {
            "target": names.in_configuration,
            "draft": names.draft(chosen.draft),
            "num_draft_tokens": num_draft_tokens,
            "rule": None if chosen.rule == "token" else chosen.rule,  # so that a seed repeats
            "dtype": chosen.dtype,
            "device": names.device,
            "revision": names.revision,
            "max_batch": findings.max_batch(),
        },
        {
            "speedup": chosen.verified,
            "interval": chosen.interval,
            "expected": chosen.expected,
            "prompts": speedup.prompts if speedup else None,
            "rounds": findings.record.rounds,
            **{name: content[name] for name in ("sampling", "machine", "command")},
        },
        findings.verdict(),
    )
    decoders = tuning.decoder_sets[0]
    drafter = decoders.by_draft[chosen.draft].drafter if chosen.draft in decoders.by_draft else None
    models = export.Models(
        names.in_other_libraries(),
        chosen.dtype,
        names.device,
        decoders.baseline.scorer.has_encoder,
        isinstance(drafter, TextDrafter),
        names.revision,
    )
    draft = names.in_other_libraries(chosen.draft)
    decided = findings.undecided_reason() is None
    tuning.results.put(
        spent_seconds=round(tuning.budget.spent, 1),
        **findings.content(),
        config=text if out is not None else None,
        transformers=(
            export.transformers(models, draft, chosen.num_draft_tokens, chosen.rule, fixed)
            if decided
            else None
        ),
        vllm=export.vllm(models, draft, chosen.num_draft_tokens, fixed) if decided else None,
    )
    if out is not None:
        if chosen.draft == NGRAM and tuning.ngram is not None:
            tuning.ngram.save(names.table)
        write_atomic(out, text)


def show(content: Content) -> None:
    """Print a table, the verdict, and the same candidate in other libraries."""
    console = screen(sys.stdout)
    candidates, chosen = content["candidates"], content["chosen"]
    shown = tune_columns(candidates)
    rows = [[cell(one) for cell in shown.values()] for one in candidates]
    tables.show(
        console,
        f"{content['target']}: speedup over the baseline (95 % interval)",
        tables.columns(list(shown), rows, words=("draft", "why")),
        keys=list(shown).index("expected"),
        bold=candidates.index(chosen) if chosen in candidates else None,
    )
    console.print(content["verdict"])
    if content["chosen"] is not None and content["chosen"]["draft"] != NONE:
        console.print(_batch_sentence(content))
    for name, title in OTHER_LIBRARIES.items():
        if content[name] is None:
            continue
        console.print(f"\n{title}:\n{content[name]}", markup=False, soft_wrap=True)


def _batch_sentence(content: Content) -> str:
    batches = [one["batch"] for one in content["candidates"] if one["batch"] > 1]
    if not batches:
        return "Larger batches were not examined."
    sequences = counted(content["max_batch"], "sequence")
    largest = f"The largest batch examined is {max(batches)}."
    return f"It is expected to pay with up to {sequences} at a time. {largest}"
