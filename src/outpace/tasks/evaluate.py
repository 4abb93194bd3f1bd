"""Evaluation of a task, row by row and with every runner: ``outpace eval``.

The runners take turns at every row, so that a machine that slows down slows all of them. The texts of a row
depend on its seed alone. So a run that was stopped and resumed gives the texts of an uninterrupted run.
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
from outpace.tasks.kinds import no_measure, runner_problem
from outpace.tasks.profiling import ProfilingDecoder
from outpace.tasks.runners import Generated, OutpaceRunner, Runner, RunSettings
from outpace.tasks.score import normal_form
from outpace.tasks.speech import OutpaceSpeechRunner, TransformersSpeechRunner
from outpace.verification import Rule
from outpace.verification.rules import sigmoid

PROFILED_ROWS = 4  # first rows, which are decoded a second time with a profiling decoder
WARMUP_TOKENS = 4  # new tokens of the warm-up, which is not timed


@dataclass
class Evaluation:
    """The runners of a comparison and their settings.

    Attributes:
        decoder: Decoder of the column ``"exact"``; the other runners share its models.
        processor: Feature extractor and tokenizer of a speech model; None for text.
        settings: Settings that all runners share.
        names: Names of the runners, from ``RUNNERS``.
        seed: Seed of the run; each row gets its own from it.
        profile: Whether to time sampling steps in separate runs, as a GPU needs it. By default this is
            done on every device but the CPU.
        runners: The runners by name.
        profilers: A profiling decoder and its runner, for each runner that is profiled.
        missing: Reasons why some of ``names`` have no runner.
        normal: Function that returns a transcript in normal form.
    """

    decoder: Decoder
    processor: Any
    settings: RunSettings
    names: Sequence[str]
    seed: int
    profile: bool | None = None

    def __post_init__(self) -> None:
        self.runners: dict[str, Runner] = {}
        self.profilers: dict[str, tuple[ProfilingDecoder, Runner]] = {}
        self.missing: dict[str, str] = {}
        tokenizer = self.decoder.tokenizer if self.processor is None else self.processor.tokenizer
        self.normal = normal_form(tokenizer, self.settings.language)
        for name in self.names:
            try:
                self.runners[name] = self._runner(name)
            except ValueError as error:
                self.missing[name] = str(error)
        if self.profile is None:
            self.profile = self.decoder.scorer.device.type != "cpu"
        for name, rule in (("exact", self.decoder.rule), ("sigmoid", self.sigmoid)):
            if name in self.runners and (self.profile or not self.settings.sampling.greedy):
                profiler = self._with_rule(ProfilingDecoder, rule)
                self.profilers[name] = profiler, self._outpace_runner(profiler)
        if "baseline" in self.runners and self.profile:
            profiler = ProfilingDecoder(self.decoder.scorer, None, self.decoder.tokenizer)
            self.profilers["baseline"] = profiler, self._outpace_runner(profiler)

    @property
    def sigmoid(self) -> Rule:
        """The sigmoid rule at the task's scale."""
        return sigmoid(-self.settings.task.scale, self.settings.task.scale)

    def _runner(self, name: str) -> Runner:
        problem = runner_problem(name, self.decoder.drafter is not None, self.settings.sampling.greedy)
        if problem is not None:
            raise ValueError(problem)
        if name == "baseline":
            return self._outpace_runner(Decoder(self.decoder.scorer, None, self.decoder.tokenizer))
        if name == "exact":
            return self._outpace_runner(self.decoder)
        if name == "assisted":
            if self.processor is None:
                return AssistedRunner(self.decoder, self.settings)
            return TransformersSpeechRunner(self.decoder, self.processor, self.settings)
        return self._outpace_runner(self._with_rule(Decoder, self.sigmoid))

    def _outpace_runner(self, decoder: Decoder) -> Runner:
        if self.processor is None:
            return OutpaceRunner(decoder, self.settings)
        return OutpaceSpeechRunner(decoder, self.processor, self.settings)

    def _with_rule(self, kind: type[Decoder], rule: Rule) -> Any:
        """Return a decoder with the same models and another rule."""
        return kind(
            self.decoder.scorer,
            self.decoder.drafter,
            self.decoder.tokenizer,
            rule=rule,
            num_draft_tokens=copy.deepcopy(self.decoder.policy),
        )

    def run(
        self,
        items: Sequence[Item],
        journal: Journal,
        step: Callable[[str, int], None] = lambda runner, row: None,
    ) -> None:
        """Run each row that the journal does not have yet, with every runner.

        Args:
            items: Rows of the data.
            journal: File of the records so far, which gets the new ones.
            step: Called with the runner's name and the row before each.
        """
        pending = [
            (row, name) for row in range(len(items)) for name in self.runners if not journal.has(name, row)
        ]
        first = next((item for item in items if self._problem(item) is None), None)
        if pending and first is not None:
            self._warm_up(first)
        for row, name in pending:
            step(name, row)
            journal.add(
                {"runner": name, "row": row, "id": items[row].name, **self._record(name, items[row], row)}
            )

    def _warm_up(self, item: Item) -> None:
        short = replace(self.settings, max_new_tokens=WARMUP_TOKENS, samples=1, with_log_probability=False)
        runner: Any
        for runner in self.runners.values():
            settings, runner.settings = runner.settings, short
            with contextlib.suppress(Exception):  # the row itself will report it
                runner.generate(item, self.seed)
            runner.settings = settings

    def _record(self, name: str, item: Item, row: int) -> dict[str, Any]:
        seed = row_seed(self.seed, row)
        try:
            problem = self._problem(item)
            if problem is not None:
                raise ValueError(problem)
            generated = self.runners[name].generate(item, seed)
            record = self._as_record(generated)
            record["judged"] = [self.settings.task.judge(item, text, self.normal) for text in generated.texts]
            if row < PROFILED_ROWS:
                try:
                    record |= self._profiled(name, item, seed)
                except Exception as error:  # the record keeps its texts
                    record["profile_error"] = first_line(error)
            return record
        except ValueError as error:
            return {"error": first_line(error).removeprefix("prompt: ").removeprefix(f"{item.audio!s}: ")}
        except Exception as error:  # one row of one runner; a resumed run repeats it
            return {"error": f"{type(error).__name__}: {first_line(error)}", "again": True}

    def _problem(self, item: Item) -> str | None:
        return item.problem or self.settings.task.row_problem(item)

    def _profiled(self, name: str, item: Item, seed: int) -> dict[str, Any]:
        """Decode a row a second time, and return the measurements that would slow down the first run."""
        measured: dict[str, Any] = {}
        if name in self.profilers:
            profiler, runner = self.profilers[name]
            profiler.reset()
            runner.generate(item, seed)
            if profiler.known and name != "baseline" and not self.settings.sampling.greedy:
                measured |= {"distance": profiler.distance, "positions": profiler.positions}
            if self.profile:
                measured |= {"sampling_seconds": profiler.seconds, "sampling_passes": profiler.passes}
        elif name == "assisted" and self.profile and not self.settings.sampling.greedy:
            assisted: Any = self.runners[name]
            assisted.synchronized = True
            try:
                stats = assisted.generate(item, seed).stats
            finally:
                assisted.synchronized = False
            measured |= {"sampling_seconds": stats.verify_seconds, "sampling_passes": stats.target_passes}
        return measured

    def _as_record(self, generated: Generated) -> dict[str, Any]:
        if self.profile:
            generated.stats.verify_seconds = 0.0  # without synchronization, the host's clock is wrong
        record: dict[str, Any] = {
            "texts": generated.texts,
            "token_ids": generated.token_ids,
            "seconds": generated.seconds,
            "stats": asdict(generated.stats),
        }
        if self.settings.with_log_probability:
            record["log_probability"] = generated.log_probability
            record["likely_tokens"] = len(generated.token_ids[0])
        return record


def row_seed(seed: int, row: int) -> int:
    """Return the seed of a row; its later turns use the seeds that follow."""
    return seed + (row << 8)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty, or its class name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def judged_by_log_probability(task: Any) -> bool:
    """Return whether answers are judged by their log-probability, for a task without references."""
    return bool(task.overall is no_measure)
