"""The results of ``outpace tune``: in the terminal, and in files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.checks.files import write_whole
from outpace.cli import tables
from outpace.cli.show import screen
from outpace.draft.text import TextDrafter
from outpace.models.hub import DEFAULT
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.report.columns import tune_columns
from outpace.tune import config, elsewhere
from outpace.tune.tuning import Tuning
from outpace.tune.way import NGRAM, NONE

Content = Mapping[str, Any]
ELSEWHERE = {"transformers": "Transformers", "vllm": "vLLM"}


@dataclass(frozen=True)
class Names:
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

    def draft(self, shown: str) -> str:
        """Return a draft's name that works from any folder.

        A fitted n-gram table is named relative to the configuration.
        """
        if shown == NGRAM:
            return f"ngram:{self.table.name}"
        return lasting(self.drafts.get(shown, shown))

    def theirs(self, shown: str | None = None) -> str:
        """Return the name of a draft, or of the target, as other libraries find it."""
        if shown == NGRAM:
            return f"ngram:{self.table.absolute()}"
        name = lasting(self.target) if shown is None else self.draft(shown)
        return f"HuggingFaceTB/{DEFAULT}" if name == DEFAULT else name


def lasting(name: str) -> str:
    """Return a name that means the same in any folder."""
    kind, colon, path = name.partition(":")
    if colon and kind == NGRAM:
        return f"ngram:{Path(path).expanduser().absolute()}"
    path_here = Path(name).expanduser()
    return str(path_here.absolute()) if path_here.exists() and name not in ("lookup", "none") else name


def keep(tuning: Tuning, names: Names, out: Path | None) -> None:
    """Save the results, and the configuration and n-gram table if a file is named for it.

    If nothing is known, no code for other libraries is saved either.

    Args:
        tuning: The tuning.
        names: Names of the models.
        out: File of the configuration; None writes none.
    """
    findings, content = tuning.findings, tuning.results.content
    chosen, near = findings.chosen(), findings.nearest()
    plain = findings.choice.way.plain
    text = config.written(
        {
            "target": lasting(names.target),
            "draft": names.draft(chosen.draft),
            "num_draft_tokens": None
            if plain
            else int(chosen.length)
            if chosen.length.isdecimal()
            else chosen.length,
            "rule": chosen.rule,
            "dtype": chosen.dtype,
            "device": names.device,
            "revision": names.revision,
            "max_batch": findings.most_rows(),
        },
        {
            "speedup": chosen.verified,
            "interval": chosen.interval,
            "expected": chosen.expected,
            "prompts": seen.prompts if (seen := findings.record.seen(findings.choice.way)) else None,
            "rounds": findings.record.rounds,
            **{name: content[name] for name in ("sampling", "machine", "command")},
        },
        findings.verdict(),
    )
    side = tuning.sides[0]
    drafter = side.drafts[chosen.draft].drafter if chosen.draft in side.drafts else None
    models = elsewhere.Models(
        names.theirs(),
        chosen.dtype,
        names.device,
        isinstance(side.plain.scorer, Seq2SeqScorer),
        isinstance(drafter, TextDrafter),
        names.revision,
    )
    there = names.theirs(chosen.draft)
    known = findings.unknown() is None
    tuning.results.put(
        spent_seconds=round(tuning.budget.spent, 1),
        **findings.content(),
        config=text if out is not None else None,
        transformers=(
            elsewhere.transformers(models, there, chosen.length, chosen.rule, near) if known else None
        ),
        vllm=elsewhere.vllm(models, there, chosen.length, near) if known else None,
    )
    if out is not None:
        if chosen.draft == NGRAM and tuning.ngram is not None:
            tuning.ngram.save(names.table)
        write_whole(out, text)


def show(content: Content) -> None:
    """Print a table, the verdict, and the same setup for other libraries."""
    console = screen(sys.stdout)
    candidates, chosen = content["candidates"], content["chosen"]
    shown = tune_columns(candidates)
    rows = [[cell(one) for cell in shown.values()] for one in candidates]
    tables.show(
        console,
        f"{content['target']}: speed over plain decoding (95 % interval)",
        tables.columns(list(shown), rows, words=("draft", "why")),
        keys=list(shown).index("expected"),
        bold=candidates.index(chosen) if chosen in candidates else None,
    )
    console.print(content["verdict"])
    if content["chosen"] is not None and content["chosen"]["draft"] != NONE:
        console.print(_rows(content))
    for name, title in ELSEWHERE.items():
        if content[name] is None:
            continue
        console.print(f"\n{title}:\n{content[name]}", markup=False, soft_wrap=True)


def _rows(content: Content) -> str:
    tried = [one["batch"] for one in content["candidates"] if one["batch"] > 1]
    if not tried:
        return "Larger batches were not looked at."
    most = content["max_batch"]
    rows = "1 row" if most == 1 else f"{most} rows"
    return f"It is expected to pay with up to {rows} at a time; {max(tried)} were tried."
