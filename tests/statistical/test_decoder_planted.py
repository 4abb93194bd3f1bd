"""The decoder's checks can fail: each bug planted here is caught by a check of the suite."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace import Decoder, Fixed, SamplingParams, Step
from outpace.draft.base import Draft, DraftSampler, DraftTensors, GraphState
from outpace.draft.model import ModelDrafter
from outpace.engine import drafting, processed, sequence
from outpace.engine import eager as eager_executor
from outpace.engine.buckets import StepKey
from outpace.engine.eager import EagerExecutor
from outpace.engine.graph import GraphExecutor
from outpace.engine.in_flight import InFlightStep
from outpace.engine.logprobs import Values
from outpace.engine.needs import has_edits
from outpace.engine.processed import Scored
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import SequenceState
from outpace.engine.slots import Slots
from outpace.engine.stats import Clock
from outpace.engine.text import Detokenizer
from outpace.models import causal, fused
from outpace.models import scorer as scorers
from outpace.models.causal import CausalScorer
from outpace.models.contiguous import ContiguousCache
from outpace.models.paged import PagedCache
from outpace.sampling import Prefix, random, rows
from outpace.sampling.rows import Edits
from outpace.verification import Verdict, eager, verify_block
from outpace.verification.block import Block
from tests.engine.test_executors import each_rule_drafts_with_its_own_noise
from tests.statistical.test_decoder import Cell, joint_distribution_is_exact, mixed_batch_is_exact
from tests.tiny import byte_tokenizer, greedy, tiny

pytestmark = pytest.mark.statistical

Plant = Callable[[pytest.MonkeyPatch], None]


def commits_one_draft_too_many(patch: pytest.MonkeyPatch) -> None:
    """Off by one in rollback."""
    honest = EagerExecutor.commit

    def commit(self: EagerExecutor, row: SequenceState, g: int, accepted: int) -> None:
        honest(self, row, g, accepted + (accepted < g))

    patch.setattr(EagerExecutor, "commit", commit)


def the_length_counts_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """No rollback: the KV cache keeps every draft token that was scored."""
    for executor in (EagerExecutor, GraphExecutor):
        honest = executor.commit

        def commit(self: Any, row: SequenceState, g: int, accepted: int, honest: Any = honest) -> None:
            honest(self, row, g, g)

        patch.setattr(executor, "commit", commit)


def rejected_drafts_stay_visible(patch: pytest.MonkeyPatch) -> None:
    """Stale cache entries after a short acceptance: the mask shows two positions past each token."""
    honest = CausalScorer._masks
    patch.setattr(CausalScorer, "_masks", lambda self, at, reach: honest(self, at + 2, reach))
    patch.setattr(CausalScorer, "_check", lambda self: None)


def penalties_miss_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """A penalty sees the wrong prefix."""
    honest = Prefix.padded.__func__  # type: ignore[attr-defined]

    def padded(cls: type[Prefix], rows: Sequence[Sequence[int]], *rest: Any) -> Prefix:
        made: Prefix = honest(cls, [[*row[:-1], row[0]] for row in rows], *rest)
        return made

    patch.setattr(Prefix, "padded", classmethod(padded))


def processors_are_not_set_back(patch: pytest.MonkeyPatch) -> None:
    verify = importlib.import_module("outpace.verification.entry")
    honest = verify.process

    def process(*arguments: Any, **named: Any) -> Any:
        scores, rewind = honest(*arguments, **named)
        return scores, None if rewind is None else lambda accepted: None

    patch.setattr(verify, "process", process)
    patch.setattr(eager_executor, "process", process)
    patch.setattr(processed, "process", process)


def noise_depends_on_the_batch(patch: pytest.MonkeyPatch) -> None:
    """Every row in a batch is drawn with the first one's noise."""
    honest = sequence.seeds

    def seeds(rows: Any, device: Any) -> Any:
        return honest(rows, device)[:1].expand(len(rows))

    patch.setattr(drafting, "seeds", seeds)
    patch.setattr(eager_executor, "seeds", seeds)


def drafts_hide_their_temperature(patch: pytest.MonkeyPatch) -> None:
    """A drafter misstates the distribution it drew from."""
    honest = Draft

    def draft(tokens: Any, logits: Any = None, lengths: Any = None, precomputed: Any = None) -> Any:
        return honest(tokens, None if logits is None else logits * 2, lengths, precomputed)

    draft.chosen = honest.chosen  # type: ignore[attr-defined]
    patch.setattr(drafting, "Draft", draft)


def unlikely_draft_tokens_are_dropped(patch: pytest.MonkeyPatch) -> None:
    """The number of draft tokens depends on the tokens themselves."""
    honest = DraftSampler.draft

    def draft(self: DraftSampler, lengths: Any = None) -> Draft:
        made = honest(self, lengths)
        assert made.logits is not None
        chance = made.logits.softmax(-1).gather(2, made.tokens[..., None])[..., 0]
        sure = (chance > 0.25).long().cumprod(1).sum(1).tolist()
        return replace(made, lengths=[min(pair) for pair in zip(sure, made.lengths or sure, strict=True)])

    patch.setattr(DraftSampler, "draft", draft)


def a_rejected_draft_is_corrected_from_p(patch: pytest.MonkeyPatch) -> None:
    """Verifying position by position, the draft's distribution is not taken off."""
    patch.setattr(eager, "LARGE_VOCAB", 1)
    patch.setattr(eager, "FEW_ROWS", 10_000)
    honest = eager.token_by_row

    def careless(block: Block, lenience: float) -> Any:
        accepted, _, bad = honest(block, lenience)
        p = eager.at(block.target_logits, accepted).softmax(-1)
        return accepted, random.sample(p, eager.noise(block)[1].gather(1, accepted[:, None]).squeeze(1)), bad

    patch.setattr(eager, "token_by_row", careless)


def corrections_reuse_the_acceptance_noise(patch: pytest.MonkeyPatch) -> None:
    """Verifying position by position, the acceptance noise picks the correction too."""
    patch.setattr(eager, "LARGE_VOCAB", 1)
    patch.setattr(eager, "FEW_ROWS", 10_000)
    honest = random.halves
    patch.setattr(random, "halves", lambda *key: [[(r, r) for r, _ in row] for row in honest(*key)])


def blocks_go_on_after_unusable_logits(patch: pytest.MonkeyPatch) -> None:
    """Rule block gives up all draft tokens before unusable logits, though they say nothing about these."""
    patch.setattr(eager, "replace", lambda block, **_: block)


def unusable_logits_count_wherever_they_are(patch: pytest.MonkeyPatch) -> None:
    """A row with unusable logits at any position is decided again, without draft tokens."""
    honest = verify_block

    def decide(block: Block, *rest: Any) -> Verdict:
        unusable = eager.unusable(block.target_logits)
        unusable[:, 1:] &= block.drafted
        again = honest(replace(block, counts=torch.zeros_like(block.lengths)), *rest)
        return again.in_rows(unusable.any(1), honest(block, *rest))

    patch.setattr(eager_executor, "verify_block", decide)


def an_end_inside_a_block_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """End-of-text counts only as the last token of an iteration."""
    honest = SequenceState.extend

    def extend(self: SequenceState, tokens: Sequence[int], context: int) -> int:
        ends, self.stop_tokens = self.stop_tokens, frozenset()
        count = honest(self, tokens, context)
        self.stop_tokens = ends
        if self.finish_reason is None and tokens and tokens[-1] in ends:
            self.finish_reason = "stop"
        return count

    patch.setattr(SequenceState, "extend", extend)


def the_graph_hides_its_drafts_temperature(patch: pytest.MonkeyPatch) -> None:
    """Draft tokens inside the graph were not sampled from the logits that verification gets."""
    honest = GraphExecutor.propose

    def propose(self: GraphExecutor, state: GraphState, g: int) -> DraftTensors:
        made = honest(self, state, g)
        return made if made.logits is None else replace(made, logits=made.logits * 2, drawn=())

    patch.setattr(GraphExecutor, "propose", propose)


def the_graph_sees_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """The mask does not hide what lies past a sequence in its KV cache."""
    honest = causal.mask_of
    patch.setattr(fused, "mask_of", lambda at, *rest: honest(at + 2, *rest))


def changed_state(patch: pytest.MonkeyPatch, change: Callable[[GraphExecutor, GraphState, int], Any]) -> None:
    """Change the state that each step of the graph executor reads."""
    honest = GraphExecutor.state

    def state(self: GraphExecutor, key: StepKey) -> GraphState:
        made = honest(self, key)
        return replace(made, **change(self, made, key.g))

    patch.setattr(GraphExecutor, "state", state)


def the_graph_has_one_noise_for_all_slots(patch: pytest.MonkeyPatch) -> None:
    honest = Slots.start

    def start(self: Slots, sequences: Sequence[SequenceState]) -> None:
        honest(self, sequences)
        self.seeds[:] = self.seeds[0].clone()

    patch.setattr(Slots, "start", start)


def rejected_tokens_are_counted(patch: pytest.MonkeyPatch) -> None:
    """Penalties count the draft tokens that a step rejected."""
    honest = Edits.count
    patch.setattr(Edits, "count", lambda self, new, counted: honest(self, new, torch.ones_like(counted)))


def a_neighbours_bias_is_added(patch: pytest.MonkeyPatch) -> None:
    honest = rows.edit

    def edit(logits: torch.Tensor, edits: Edits, drafted: torch.Tensor) -> torch.Tensor:
        return honest(logits, replace(edits, bias=edits.bias.roll(1, 0)), drafted)

    patch.setattr(importlib.import_module("outpace.verification.entry"), "edit", edit)


def edits_of_the_last_owner_stay(patch: pytest.MonkeyPatch) -> None:
    """A sequence without edits does not clear those of the sequence that had its slot."""
    honest = Slots._start_edits

    def start_edits(self: Slots, edits: Edits, slot: int, sampling: SamplingParams) -> None:
        if has_edits(sampling):
            honest(self, edits, slot, sampling)

    patch.setattr(Slots, "_start_edits", start_edits)


def the_mask_is_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    """Bits of allowed tokens belong to the tokens before them."""
    honest = rows.edit

    def edit(logits: torch.Tensor, edits: Edits, drafted: torch.Tensor) -> torch.Tensor:
        return honest(logits, replace(edits, allowed=edits.allowed >> 1), drafted)

    patch.setattr(importlib.import_module("outpace.verification.entry"), "edit", edit)


def log_probabilities_are_the_drafts(patch: pytest.MonkeyPatch) -> None:
    honest = GraphExecutor.decide

    def decide(self: GraphExecutor, key: StepKey, scored: Scored) -> Any:
        result, q = honest(self, key, scored), scored.draft.logits
        if result.values.logprobs is not None and q is not None:
            new = torch.cat((scored.draft.tokens, result.counts[:, 1:2]), dim=1)
            result.values = Values.of(torch.cat((q, q[:, -1:]), dim=1), scored.raw, new, key.needs.top, False)
        return result

    patch.setattr(GraphExecutor, "decide", decide)


def idle_slots_are_not_hidden(patch: pytest.MonkeyPatch) -> None:
    """A step writes the KV cache of idle slots, also of one that is being prefilled."""

    def positions(executor: GraphExecutor, state: GraphState, g: int) -> Any:
        at = state.lengths[:, None] + torch.arange(-2, g)
        return {"positions": at.clamp(0, executor.target.context)}

    changed_state(patch, positions)


def shared_blocks_are_written(patch: pytest.MonkeyPatch) -> None:
    """A sequence does not copy a block that it shares before it writes to it."""

    honest = PagedCache.reserve

    def reserve(self: PagedCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        shared, self._references = self._references, dict.fromkeys(self._references, 1)
        honest(self, slots, lengths)
        self._references |= shared

    patch.setattr(PagedCache, "reserve", reserve)


def steps_in_flight_reach_the_next_owner(patch: pytest.MonkeyPatch) -> None:
    """The outcome of a step goes to the slot, whichever sequence has it by now."""
    patch.setattr(GraphExecutor, "is_async", True)  # two steps are in flight, as on CUDA
    honest = Scheduler._finish

    def finish(self: Scheduler, started: InFlightStep, clock: Clock) -> list[Step]:
        rows = {slot: self._active.get(slot, row) for slot, row in started.sequences.items()}
        return honest(self, replace(started, sequences=rows), clock)

    patch.setattr(Scheduler, "_finish", finish)


def rows_move_without_the_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A row that changes places leaves the tokens of a step behind whose outcome is not read yet."""
    honest = ContiguousCache._place

    def place(self: ContiguousCache, slot: int, row: int) -> None:
        reserved, self._reserved = self._reserved, self._lengths
        honest(self, slot, row)
        self._reserved = reserved

    patch.setattr(ContiguousCache, "_place", place)


@pytest.mark.parametrize(
    ("plant", "cell"),
    [
        (the_graph_hides_its_drafts_temperature, Cell("model", policy="f 3", engine=True)),
        (the_graph_hides_its_drafts_temperature, Cell("ngram", policy="f 3", engine=True)),
        (the_graph_sees_rejected_drafts, Cell("model", policy="f 3", engine=True)),
        (the_graph_has_one_noise_for_all_slots, Cell("model", policy="f 2", batch_size=50, engine=True)),
        (shared_blocks_are_written, Cell("model", policy="f 3", engine=True)),
        (rejected_tokens_are_counted, Cell("model", sampling="counts", policy="f 3", engine=True)),
        (processors_are_not_set_back, Cell("random", sampling="processors", policy="f 3", engine=True)),
        (
            steps_in_flight_reach_the_next_owner,
            Cell("model", policy="f 2", batch_size=64, stops=True, engine=True),
        ),
        (the_length_counts_rejected_drafts, Cell("random", sampling="warm", policy="f 3")),
        (commits_one_draft_too_many, Cell("model", sampling="warm", policy="f 3")),
        (rejected_drafts_stay_visible, Cell("random", policy="f 3")),
        (penalties_miss_the_last_token, Cell("model", sampling="counts", policy="f 2")),
        (processors_are_not_set_back, Cell("random", sampling="processors", policy="f 3")),
        (noise_depends_on_the_batch, Cell("model", policy="f 2", batch_size=50)),
        (drafts_hide_their_temperature, Cell("model", "block", "warm", "h 2", stops=True)),
        (unlikely_draft_tokens_are_dropped, Cell("model", policy="f 3")),
        (an_end_inside_a_block_is_ignored, Cell("model", policy="f 3", stops=True)),
        (
            blocks_go_on_after_unusable_logits,
            Cell("model", "block", "grammar", "f 3", stops=True, draft_sampling="plain"),
        ),
        (unusable_logits_count_wherever_they_are, Cell("model", "token", "grammar", "f 3", stops=True)),
        (a_rejected_draft_is_corrected_from_p, Cell("model", policy="f 3")),
        (corrections_reuse_the_acceptance_noise, Cell("lookup", policy="f 3")),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_planted_fault_is_caught_by_the_joint_distribution(
    plant: Plant, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"χ² p-value|an impossible text came out"):
        joint_distribution_is_exact(cell)


@pytest.mark.parametrize("targets_noise", [True, False])
def test_drafts_with_the_noise_of_the_other_rule_are_caught_by_their_texts(
    targets_noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert each_rule_drafts_with_its_own_noise(engine=True)
    changed_state(monkeypatch, lambda executor, state, g: {"own_noise": targets_noise} if g else {})
    assert not each_rule_drafts_with_its_own_noise(engine=True)


@pytest.mark.parametrize(
    "plant", [a_neighbours_bias_is_added, the_mask_is_shifted_by_one, edits_of_the_last_owner_stay]
)
def test_edits_of_the_wrong_logits_are_caught_by_a_mixed_batch(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"χ² p-value|an impossible text came out"):
        mixed_batch_is_exact(engine=True, samples=450)


def test_log_probabilities_of_the_draft_are_caught_by_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def are_the_targets() -> bool:
        decoder = Decoder(tiny(), tiny(seed=1), rule="token", num_draft_tokens=Fixed(2), engine=True)
        out = decoder.generate([5, 6, 7], seed=3, max_new_tokens=12, logprobs=True)
        with torch.inference_mode():
            logits = tiny()(input_ids=torch.tensor([[5, 6, 7, *out.token_ids]])).logits[0, 2:-1]
        new = torch.tensor(out.token_ids)[:, None]
        expected = logits.double().log_softmax(-1).gather(1, new).flatten()
        assert out.logprobs is not None
        return bool(torch.allclose(torch.tensor(out.logprobs).double(), expected, atol=1e-3))

    assert are_the_targets()
    log_probabilities_are_the_drafts(monkeypatch)
    assert not are_the_targets()


def test_rows_that_read_their_neighbours_are_caught_by_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [torch.randint(61, (n,)).tolist() for n in (3, 11, 1, 6, 2)]
    texts = [greedy(tiny(), prompt, 20) for prompt in prompts]
    end = texts[0][4]  # the first row leaves before the others
    expected = [text[: text.index(end) + 1] if end in text else text for text in texts]

    def as_alone() -> bool:
        decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(2))
        outs = decoder.generate(prompts, temperature=0, max_new_tokens=20, stop_tokens=[end], batch_size=3)
        return [out.token_ids for out in outs] == expected

    assert as_alone()
    monkeypatch.setattr(ContiguousCache, "_swap", lambda self, one, other, length: None)
    assert not as_alone()


Requests = list[tuple[list[int], int]]  # prompts, each with the number of new tokens


def scheduled(decoder: Decoder, requests: Requests, batch_size: int) -> list[list[int]]:
    """Return greedy texts of requests, of which each takes the slot of one that has ended."""
    texts: dict[int, list[int]] = {}
    with decoder.scheduler(batch_size) as scheduler:
        for prompt, tokens in requests:
            scheduler.add(decoder.requests(prompt, temperature=0, max_new_tokens=tokens)[0])
        while scheduler.unfinished:
            for step in scheduler.step():
                texts.setdefault(step.index, []).extend(step.token_ids)
    return [texts[i] for i in range(len(requests))]


def test_a_step_that_writes_to_a_slot_in_prefill_is_caught_by_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scorers, "CHUNK", 8)
    requests: Requests = [([1, 2, 3], 2), ([4, 5, 6], 60), ([*range(60)], 20)]
    expected = [greedy(tiny(), prompt, tokens) for prompt, tokens in requests]

    def texts() -> list[list[int]]:
        decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(2), engine=True)
        return scheduled(decoder, requests, batch_size=2)

    assert texts() == expected
    idle_slots_are_not_hidden(monkeypatch)
    found = texts()
    assert found[:2] == expected[:2]
    assert found[2] != expected[2]


def test_a_row_that_moves_without_the_step_in_flight_is_caught_by_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GraphExecutor, "is_async", True)
    # Later prompts are longer, so that a prefill overwrites what was left behind.
    requests: Requests = [(torch.randint(61, (3 + 6 * n,)).tolist(), 3 + 5 * n % 17) for n in range(12)]
    expected = [greedy(tiny("gpt2"), prompt, tokens) for prompt, tokens in requests]

    def texts() -> list[list[int]]:
        return scheduled(Decoder(tiny("gpt2"), engine=True), requests, batch_size=4)

    assert texts() == expected
    rows_move_without_the_step_in_flight(monkeypatch)
    assert texts() != expected


def test_a_length_that_counts_rejected_drafts_is_caught_by_the_next_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(20))
    text = greedy(tiny(), prompt, 20)

    def continues() -> bool:
        decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3), engine=True)
        first = decoder.generate(prompt, temperature=0, max_new_tokens=8).token_ids
        second = decoder.generate(prompt + text[:8] + [5] * 8, temperature=0, max_new_tokens=12).token_ids
        return first == text[:8] and second == greedy(tiny(), prompt + text[:8] + [5] * 8, 12)

    assert continues()
    the_length_counts_rejected_drafts(monkeypatch)
    assert not continues()


def test_a_draft_cache_that_is_not_caught_up_is_caught_by_its_acceptance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output stays exact, as it must, whatever the drafter does; what falls is how often it is right."""
    honest = ModelDrafter._catch_up

    def catch_up(self: ModelDrafter, state: Any) -> torch.Tensor:
        for row, text in zip(state.slots, state.tokens, strict=True):
            if row in self._texts and len(text) - self.scorer.cache.length(row) > 1:
                # the last draft token, accepted and never fed, is skipped
                self.scorer.cache.commit(row, len(text) - 1 - self.scorer.cache.length(row))
        return honest(self, state)

    def acceptance() -> float:
        decoder = Decoder(tiny(), tiny(), num_draft_tokens=Fixed(3))
        out = decoder.generate([5, 6, 7], SamplingParams(temperature=0), max_new_tokens=40)
        assert out.token_ids == greedy(tiny(), [5, 6, 7], 40)
        return out.stats.acceptance_rate

    assert acceptance() == 1
    monkeypatch.setattr(ModelDrafter, "_catch_up", catch_up)
    assert acceptance() < 1


def test_a_stop_string_missed_across_a_border_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    target = tiny(vocab_size=272)
    decoder = Decoder(target, target, tokenizer, num_draft_tokens=Fixed(4))
    whole = decoder.generate("abc", temperature=0, max_new_tokens=40)
    assert whole.text is not None
    stop = whole.text[9:12]

    def stopped() -> bool:
        out = decoder.generate("abc", temperature=0, max_new_tokens=40, stop=stop)
        return out.text == whole.text[: whole.text.index(stop)] if whole.text else False

    assert stopped()

    def add(self: Detokenizer, new: str) -> bool:
        self.text += new
        self._ends.append((len(self.text), len(self._tokens) - 1))
        return any(stop in new for stop in self._stops)  # looks inside the new token alone

    monkeypatch.setattr(Detokenizer, "_add", add)
    assert not stopped()
