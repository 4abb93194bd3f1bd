"""A race of setups over whole texts, in which slow ones are dropped.

In a round, all setups that are left decode one prompt, and so does the target without speculation. For n
setups the time is divided into ⌈log2 n⌉ equal parts. At the end of each part the slower half is dropped, down
to two (successive halving). A setup that is surely slower is dropped at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outpace.bench.cost import let_go
from outpace.bench.runs import PLAIN, Cell, Run
from outpace.bench.spread import Rate
from outpace.bench.sweep import Sweep, rotated
from outpace.checks.errors import counted
from outpace.decoder import Decoder, WithModel
from outpace.sampling import SamplingParams
from outpace.tune.decision import Seen, better_half, compare
from outpace.tune.way import Setting

SETTLED = 6  # prompts after which a surely slower setup is dropped
SHARP = 0.05  # half-width of an interval, relative to the speed, that is narrow enough
TURNS = 3  # rounds with the same prompt at most
LEAST_ROUNDS = 3  # rounds that there must be time for with all setups that start

Left = Callable[[], float]
Tell = Callable[[str], None]


@dataclass
class Record:
    """The measurements of a race.

    Attributes:
        rates: Tokens and seconds of each setup, by prompt and by the number of its earlier rounds.
        yardsticks: The same without speculation in the same rounds, for each setup.
        dropped: Why some setups were not measured to the end.
        rounds: Number of rounds.
    """

    rates: dict[Setting, dict[tuple[int, int], Rate]] = field(default_factory=dict)
    yardsticks: dict[Setting, dict[tuple[int, int], Rate]] = field(default_factory=dict)
    dropped: dict[Setting, str] = field(default_factory=dict)
    rounds: int = 0

    def seen(self, way: Setting) -> Seen | None:
        """Return the speed of a setup relative to no speculation; None if it was not measured."""
        return compare(self.rates.get(way, {}), self.yardsticks.get(way, {}))


class Race:
    """A race of setups.

    Args:
        decoders: Decoder of each setup, the most promising first; its own policy is "auto".
        plain: The setup without speculation and its decoder.
        prompts: Token ids of each prompt.
        sampling: Sampling parameters.
        tokens: Maximum number of new tokens of a text.
        seed: Seed of sampling.
        text: Estimated seconds of a text, until one was timed.
        record: Receives the measurements.
    """

    def __init__(
        self,
        decoders: dict[Setting, Decoder],
        plain: tuple[Setting, Decoder],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        tokens: int,
        seed: int,
        text: float,
        record: Record,
    ) -> None:
        self.ways, self.record, self.text = list(decoders), record, text
        names = {way: f"{way.draft} {way.rule} {way.dtype}" for way in (*self.ways, plain[0])}
        own = {names[way]: decoder for way, decoder in (*decoders.items(), plain)}
        self._own = own
        self.cells = {way: Cell(names[way], sampling, way.length) for way in names}
        # An engine's KV caches are large, so drafts are measured one after the other.
        self.apart = any(decoder.engines is not None for decoder in own.values())
        self.plain = {
            way: Cell(names[way] if self.apart else names[plain[0]], sampling, PLAIN) for way in self.ways
        }
        lengths = list(dict.fromkeys(way.length for way in self.ways))
        # The target's prefill is the same for all setups and not counted; the draft's prefill is.
        self.sweep = Sweep(own, [sampling], lengths, prompts, tokens=tokens, seed=seed, beginning=1)

    def rounds(self, left: Left, tell: Tell = lambda line: None, first: int = 0) -> Iterator[None]:
        """Measure rounds until the result is clear or no time is left, and yield after each.

        Args:
            left: Function that returns the seconds left.
            tell: Called with lines about the progress.
            first: Number of the first round.
        """
        groups: dict[Cell, list[Setting]] = {}
        for way in self.ways:
            groups.setdefault(self.plain[way], []).append(way)
        for i, (plain, ways) in enumerate(groups.items()):
            later = left() * (1 - 1 / (len(groups) - i))  # seconds for the other groups
            yield from self._rounds(plain, ways, lambda later=later: left() - later, tell, first)  # type: ignore[misc]
            if self.apart:
                let_go(self.sweep.decoders[plain.draft])

    def _rounds(self, plain: Cell, ways: list[Setting], left: Left, tell: Tell, first: int) -> Iterator[None]:
        runners = self._start(plain, ways, left, tell)
        span, parts = left(), max(1, math.ceil(math.log2(max(1, len(runners)))))
        part, count = 0, len(self.sweep.groups)
        for turn in range(first, first + TURNS * count):
            if not runners or self._clear(runners):
                return
            found = self._round(plain, runners, turn, left, tell)
            if found is None:
                return
            for way in runners:
                key = turn % count, turn // count
                if found[self.cells[way]].tokens and found[plain].tokens:
                    self.record.rates.setdefault(way, {})[key] = _rate(found[self.cells[way]])
                    self.record.yardsticks.setdefault(way, {})[key] = _rate(found[plain])
            self.record.rounds += 1
            yield
            runners = self._faster(runners)
            if left() < span * (1 - (part + 1) / parts):
                part += 1
                runners = self._halved(runners)

    def _start(self, plain: Cell, ways: list[Setting], left: Left, tell: Tell) -> list[Setting]:
        """Warm up the setups that there is time for, and return them."""
        most = max(1, int(left() / (LEAST_ROUNDS * self.text)) - 1) if self.text else len(ways)
        for way in ways[most:]:
            self.record.dropped[way] = "no time to measure it: others promise more"
        ready = list[Setting]()
        cells: dict[Cell, Setting | None] = {plain: None} | {self.cells[way]: way for way in ways[:most]}
        # The largest workspace first, or the engine would be rebuilt several times.
        order = (
            sorted(cells, key=lambda cell: -self.sweep.writers[cell].policy.max_draft_tokens)
            if self.apart
            else cells
        )
        for cell in order:
            warmed = cells[cell]
            if left() < self.text:
                if warmed is not None:
                    self.record.dropped[warmed] = "no time to measure it"
                continue
            tell(f"warming up: {warmed or 'plain decoding'}")
            self.sweep.warm(cell, short=not self.apart)
            if warmed is not None:
                ready.append(warmed)
        return [way for way in ways if way in ready]

    def _round(
        self, plain: Cell, runners: Sequence[Setting], turn: int, left: Left, tell: Tell
    ) -> dict[Cell, Run] | None:
        """Return the measurements of all setups with one prompt; None if there was no time for it."""
        repeat, group = divmod(turn, len(self.sweep.groups))
        found = {}
        for cell in rotated([plain, *(self.cells[way] for way in runners)], turn):
            before = left()
            if before < self.text:
                return None
            tell(f"round {turn + 1}: {cell.draft.rsplit(' ', 2)[0]}, g = {cell.length}")
            drafter = self._own[cell.draft].drafter
            if isinstance(drafter, WithModel):
                drafter.scorer.forget()
            found[cell] = self.sweep.run(cell, group, repeat)
            self.text = max(self.text, before - left())
        return found

    def _faster(self, runners: list[Setting]) -> list[Setting]:
        """Drop setups that are surely slower than no speculation, or than the fastest."""
        seen = {way: found for way in runners if (found := self.record.seen(way)) is not None}
        if not seen:
            return runners
        first = max(seen, key=lambda way: seen[way].speed)
        kept = []
        for way in runners:
            behind = compare(self.record.rates.get(way, {}), self.record.rates[first])
            if way in seen and seen[way].prompts >= SETTLED and seen[way].surely_slower:
                self.record.dropped[way] = "slower than plain decoding"
            elif behind is not None and behind.prompts >= SETTLED and behind.surely_slower:
                self.record.dropped[way] = f"slower than {first}"
            else:
                kept.append(way)
        return kept

    def _halved(self, runners: list[Setting]) -> list[Setting]:
        if len(runners) <= 2:
            return runners
        kept = better_half(runners, self.record.rates, self.record.yardsticks)
        for way in runners:
            if way not in kept:
                prompts = len({prompt for prompt, _ in self.record.rates.get(way, {})})
                self.record.dropped[way] = f"in the slower half after {counted(prompts, 'prompt')}"
        return kept

    def _clear(self, runners: Sequence[Setting]) -> bool:
        """Return whether a single setup is left, and its speed is known well."""
        seen = self.record.seen(runners[0])
        if len(runners) > 1 or seen is None or seen.interval is None or seen.prompts < SETTLED:
            return False
        return seen.interval[1] - seen.interval[0] < 2 * SHARP * seen.speed


def _rate(run: Run) -> Rate:
    return run.tokens, run.seconds
