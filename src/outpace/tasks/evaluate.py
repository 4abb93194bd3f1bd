"""Evaluation of a task, row by row and with every runner: ``outpace eval``.

Runners take turns at every row, so that a machine that slows down slows all of them. The texts of a row
depend on its seed alone. So a run that was stopped and resumed ends like one that was not.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outpace.bench.data import Item
from outpace.decoder import Decoder
from outpace.tasks.assisted import AssistedRunner
from outpace.tasks.journal import Journal
from outpace.tasks.kinds import no_measure, no_side
from outpace.tasks.probe import Probe
from outpace.tasks.runners import Generated, OutpaceRunner, Runner, RunSettings
from outpace.tasks.score import normal_form
from outpace.tasks.speech import OutpaceSpeechRunner, TransformersSpeechRunner
from outpace.verification import Rule
from outpace.verification.rules import sigmoid

PROBED = 4  # first rows that are decoded a second time, to be measured by a probe
WARM = 4  # tokens of the warm-up, before anything is timed


@dataclass
class Evaluation:
    """The runners of a comparison and their settings.

    Attributes:
        decoder: Decoder of the column ``"exact"``; the other runners share its models.
        processor: Feature extractor and tokenizer of a speech model; None for text.
        wanted: Settings that all runners share.
        names: Names of the runners, out of ``SIDES``.
        seed: Seed of the run; each row gets its own from it.
        profile: Whether to time sampling steps in runs of their own, as is needed on a GPU. By default that
            is done on every device but the CPU.
        sides: The runners by name.
        probes: A probe and its runner, for each runner that is measured a second time.
        missing: Reasons why some of ``names`` have no runner.
        normal: Function that brings a transcript to normal form.
    """

    decoder: Decoder
    processor: Any
    wanted: RunSettings
    names: Sequence[str]
    seed: int
    profile: bool | None = None

    def __post_init__(self) -> None:
        self.sides: dict[str, Runner] = {}
        self.probes: dict[str, tuple[Probe, Runner]] = {}
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
        """The sigmoid rule at the task's scale."""
        return sigmoid(-self.wanted.task.scale, self.wanted.task.scale)

    def _side(self, name: str) -> Runner:
        why = no_side(name, self.decoder.drafter is not None, self.wanted.sampling.greedy)
        if why is not None:
            raise ValueError(why)
        if name == "plain":
            return self._ours(Decoder(self.decoder.scorer, None, self.decoder.tokenizer))
        if name == "exact":
            return self._ours(self.decoder)
        if name == "baseline":
            if self.processor is None:
                return AssistedRunner(self.decoder, self.wanted)
            return TransformersSpeechRunner(self.decoder, self.processor, self.wanted)
        return self._ours(self._like(Decoder, self.sigmoid))

    def _ours(self, decoder: Decoder) -> Runner:
        if self.processor is None:
            return OutpaceRunner(decoder, self.wanted)
        return OutpaceSpeechRunner(decoder, self.processor, self.wanted)

    def _like(self, kind: type[Decoder], rule: Rule) -> Any:
        """Return a decoder with the same models and another rule.

        A probe has no engine, as a graph does not show the parts of a step.
        """
        return kind(
            self.decoder.scorer,
            self.decoder.drafter,
            self.decoder.tokenizer,
            rule=rule,
            num_draft_tokens=copy.deepcopy(self.decoder.policy),
            engine=False if kind is Probe else None,
        )

    def run(
        self,
        items: Sequence[Item],
        journal: Journal,
        step: Callable[[str, int], None] = lambda side, row: None,
    ) -> None:
        """Run each row that the journal does not have yet, with every runner.

        Args:
            items: Rows of the data.
            journal: File of the records so far, which gets the new ones.
            step: Called with the runner's name and the row before each.
        """
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
            with contextlib.suppress(Exception):  # the row itself will report it
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
                except Exception as error:  # the texts are kept
                    record["not_looked_into"] = first_line(error)
            return record
        except ValueError as error:
            return {"error": first_line(error).removeprefix("prompt: ").removeprefix(f"{item.audio!s}: ")}
        except Exception as error:  # one row of one runner; a resumed run repeats it
            return {"error": f"{type(error).__name__}: {first_line(error)}", "again": True}

    def _problem(self, item: Item) -> str | None:
        return item.problem or self.wanted.task.lacking(item)

    def _looked_into(self, name: str, item: Item, seed: int) -> dict[str, Any]:
        """Return what can only be measured slowly, from a second run of the row."""
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
            found |= {"sampling_seconds": stats.verify_seconds, "sampling_passes": stats.target_passes}
        return found

    def _written(self, written: Generated) -> dict[str, Any]:
        if self.profile:
            written.stats.verify_seconds = 0.0  # the host's clock does not show what the device worked on
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
    """Return the seed of a row; its later turns take the seeds that follow."""
    return seed + (row << 8)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty, or its class name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def likely(task: Any) -> bool:
    """Return whether answers are judged by their log-probability, as there is nothing to compare with."""
    return bool(task.overall is no_measure)
