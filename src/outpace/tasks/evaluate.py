"""A task, row by row, by every side of a comparison: `outpace eval`.

Sides take turns at every row, so that what slows a machine down slows all of them. A row's texts depend on
its seed alone, so that a run that was stopped and goes on ends as one that was not.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outpace.decode import Decoder
from outpace.tasks.items import Item
from outpace.tasks.journal import Journal
from outpace.tasks.kinds import no_measure, no_side
from outpace.tasks.probe import Probe
from outpace.tasks.score import normal_form
from outpace.tasks.sides import Ours, Side, Wanted, Written
from outpace.tasks.speech import OursHearing, TheirsHearing
from outpace.tasks.theirs import Theirs
from outpace.verify import Rule
from outpace.verify.rules import sigmoid

PROBED = 4  # first rows that are decoded once more, to be looked into
WARM = 4  # tokens before anything is timed


@dataclass
class Evaluation:
    """Sides that write about items.

    decoder  the one of the column "exact"; the others share its models
    names    which sides there are; those that cannot be have a reason in `missing`
    """

    decoder: Decoder
    processor: Any
    wanted: Wanted
    names: Sequence[str]
    seed: int
    profile: bool | None = None  # time sampling steps in rows of their own, as is needed on a GPU

    def __post_init__(self) -> None:
        self.sides: dict[str, Side] = {}
        self.probes: dict[str, tuple[Probe, Side]] = {}
        self.missing: dict[str, str] = {}
        tokenizer = self.decoder.tokenizer if self.processor is None else self.processor.tokenizer
        self.normal = normal_form(tokenizer, self.wanted.language)
        for name in self.names:
            try:
                self.sides[name] = self._side(name)
            except ValueError as error:
                self.missing[name] = str(error)
        if self.profile is None:
            self.profile = self.decoder.scorer.device.type != "cpu"
        for name, rule in (("exact", self.decoder.rule), ("sigmoid", self.sigmoid)):
            if name in self.sides and (self.profile or not self.wanted.sampling.greedy):
                probe = self._like(Probe, rule)
                self.probes[name] = probe, self._ours(probe)
        if "plain" in self.sides and self.profile:
            probe = Probe(self.decoder.scorer, None, self.decoder.tokenizer, engine=False)
            self.probes["plain"] = probe, self._ours(probe)

    @property
    def sigmoid(self) -> Rule:
        return sigmoid(-self.wanted.task.scale, self.wanted.task.scale)

    def _side(self, name: str) -> Side:
        why = no_side(name, self.decoder.drafter is not None, self.wanted.sampling.greedy)
        if why is not None:
            raise ValueError(why)
        if name == "plain":
            return self._ours(Decoder(self.decoder.scorer, None, self.decoder.tokenizer))
        if name == "exact":
            return self._ours(self.decoder)
        if name == "baseline":
            if self.processor is None:
                return Theirs(self.decoder, self.wanted)
            return TheirsHearing(self.decoder, self.processor, self.wanted)
        return self._ours(self._like(Decoder, self.sigmoid))

    def _ours(self, decoder: Decoder) -> Side:
        if self.processor is None:
            return Ours(decoder, self.wanted)
        return OursHearing(decoder, self.processor, self.wanted)

    def _like(self, kind: type[Decoder], rule: Rule) -> Any:
        """A decoder as ours is, with another rule. A graph says nothing of its parts, so a probe has none."""
        return kind(
            self.decoder.scorer,
            self.decoder.drafter,
            self.decoder.tokenizer,
            rule=rule,
            length=copy.deepcopy(self.decoder.length),
            engine=False if kind is Probe else None,
        )

    def run(
        self,
        items: Sequence[Item],
        journal: Journal,
        step: Callable[[str, int], None] = lambda side, row: None,
    ) -> None:
        """Whatever the journal does not have yet; `step` is called before each."""
        left = [(row, name) for row in range(len(items)) for name in self.sides if not journal.has(name, row)]
        first = next((one for one in items if self._problem(one) is None), None)
        if left and first is not None:
            self._warm(first)
        for row, name in left:
            step(name, row)
            journal.add(
                {"side": name, "row": row, "id": items[row].name, **self._record(name, items[row], row)}
            )

    def _warm(self, item: Item) -> None:
        few = replace(self.wanted, max_new_tokens=WARM, samples=1, likely=False)
        for side in self.sides.values():
            used: Any = side
            before, used.wanted = used.wanted, few
            with contextlib.suppress(Exception):  # the row itself will say so
                side.write(item, self.seed)
            used.wanted = before

    def _record(self, name: str, item: Item, row: int) -> dict[str, Any]:
        seed = seed_of(self.seed, row)
        try:
            problem = self._problem(item)
            if problem is not None:
                raise ValueError(problem)
            written = self.sides[name].write(item, seed)
            record = self._written(written)
            record["judged"] = [self.wanted.task.judge(item, text, self.normal) for text in written.texts]
            if row < PROBED:
                try:
                    record |= self._looked_into(name, item, seed)
                except Exception as error:  # what was written stays
                    record["not_looked_into"] = first_line(error)
            return record
        except ValueError as error:
            return {"error": first_line(error).removeprefix("prompt: ").removeprefix(f"{item.audio!s}: ")}
        except Exception as error:  # one row, of one side; a run that goes on tries it again
            return {"error": f"{type(error).__name__}: {first_line(error)}", "again": True}

    def _problem(self, item: Item) -> str | None:
        return item.problem or self.wanted.task.lacking(item)

    def _looked_into(self, name: str, item: Item, seed: int) -> dict[str, Any]:
        """What one can only see by going slower: the row is written once more."""
        found: dict[str, Any] = {}
        if name in self.probes:
            probe, side = self.probes[name]
            probe.begin()
            side.write(item, seed)
            if probe.known and name != "plain" and not self.wanted.sampling.greedy:
                found |= {"distance": probe.distance, "positions": probe.positions}
            if self.profile:
                found |= {"sampling_seconds": probe.seconds, "sampling_passes": probe.passes}
        elif name == "baseline" and self.profile and not self.wanted.sampling.greedy:
            theirs: Any = self.sides[name]
            theirs.waits = True
            try:
                stats = theirs.write(item, seed).stats
            finally:
                theirs.waits = False
            found |= {"sampling_seconds": stats.verify_seconds, "sampling_passes": stats.target_calls}
        return found

    def _written(self, written: Written) -> dict[str, Any]:
        if self.profile:
            written.stats.verify_seconds = 0.0  # the host's clock does not tell what it was spent on
        record: dict[str, Any] = {
            "texts": written.texts,
            "tokens": written.tokens,
            "seconds": written.seconds,
            "stats": asdict(written.stats),
        }
        if self.wanted.likely:
            record["log_probability"] = written.log_probability
            record["likely_tokens"] = len(written.tokens[0])
        return record


def seed_of(seed: int, row: int) -> int:
    """Return the seed of a row, of which its turns take the next ones."""
    return seed + (row << 8)


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def likely(task: Any) -> bool:
    """Whether answers are judged by how likely they are: where there is nothing to compare them with."""
    return bool(task.overall is no_measure)
