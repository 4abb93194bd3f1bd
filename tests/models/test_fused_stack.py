"""Fused decoders of encoder-decoder models score as the Transformers models that they are made from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outpace
from outpace import Decoder, Fixed
from outpace.models.choice import scorer_of, why_not_fused
from outpace.models.encoder import EncoderScorer
from outpace.models.fused_seq2seq import FusedSeq2SeqScorer
from outpace.models.fused_stack import FusedStack, SourcePages, activation_of
from outpace.models.rearranged import kind_of
from outpace.models.seq2seq import Seq2SeqScorer
from tests import tiers
from tests.models.test_seq2seq import transformers_logits
from tests.tiny import SEQ2SEQ, V, greedy_of, sources, tiny_seq2seq

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def wide(inputs: list[Any]) -> list[Any]:
    return [one.double() if isinstance(one, torch.Tensor) else one for one in inputs]


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_ragged_rows_score_as_the_transformers_model(family: str) -> None:
    model = tiny_seq2seq(family).double()
    scorer, reference = FusedSeq2SeqScorer(model), tiny_seq2seq(family).double()
    inputs = wide(sources(family, 7, 3, 12))
    texts = [[1, *range(10, 10 + n)] for n in (0, 4, 9)]
    first = scorer.prefill([0, 1, 2], texts, [scorer.source(one) for one in inputs])
    new = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(1))
    scorer.score([0, 1, 2], new.flip(0))  # is rejected
    found = scorer.score([0, 1, 2], new)
    for row in range(3):
        expected = transformers_logits(reference, inputs[row], [*texts[row], *new[row].tolist()])
        assert torch.allclose(first[row], expected[len(texts[row]) - 1], atol=1e-6)
        assert torch.allclose(found[row], expected[len(texts[row]) :], atol=1e-6)
    # One sequence leaves, another one takes its slot, and the slots are scored in another order.
    scorer.reset([1])
    other = wide(sources(family, 20))[0]
    scorer.prefill([1], [[1, 5]], [scorer.source(other)])
    found = scorer.score([2, 1], new[:2])
    for i, (source, text) in enumerate([(inputs[2], texts[2]), (other, [1, 5])]):
        expected = transformers_logits(reference, source, [*text, *new[i].tolist()])
        assert torch.allclose(found[i], expected[len(text) :], atol=1e-6)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_the_models_own_forward_still_works_after_its_weights_were_combined(family: str) -> None:
    model, source = tiny_seq2seq(family), sources(family, 7)[0]
    before = transformers_logits(model, source, [1, 5, 9])
    scorer = FusedSeq2SeqScorer(model)
    assert torch.allclose(transformers_logits(model, source, [1, 5, 9]), before, atol=1e-5)
    assert scorer.is_current


def test_sequences_about_one_source_share_its_keys_and_values() -> None:
    scorer = FusedSeq2SeqScorer(tiny_seq2seq("bart"))
    first, second = (scorer.source(one) for one in sources("bart", 40, 40))
    scorer.prefill([0, 1, 2], [[1]] * 3, [first, first, second])
    shared = scorer.sources.blocks_in_use
    assert shared == 2 * -(-40 // scorer.sources.page)
    scorer.reset([0], [[1]])
    assert scorer.sources.blocks_in_use == shared  # slot 1 still has the first source
    expected = scorer.score([1], torch.tensor([[7, 8]]))
    scorer.reset([1, 2], [[1], [1]])
    assert scorer.sources.blocks_in_use == 0
    scorer.prefill([0], [[1]], [first])
    assert torch.allclose(scorer.score([0], torch.tensor([[7, 8]])), expected, atol=1e-4)


def test_equal_prompts_about_different_sources_share_nothing() -> None:
    """A long prompt, as of Whisper's earlier text, is no prefix to reuse: its keys depend on the source."""
    model = tiny_seq2seq("whisper").double()
    prompt = [1, *range(5, 45)]
    inputs = wide(sources("whisper", 0, 1))
    expected = [transformers_logits(model, one, prompt)[-1] for one in inputs]
    scorer = FusedSeq2SeqScorer(copy.deepcopy(model))
    for _ in range(2):
        found = scorer.prefill([0, 1], [prompt] * 2, [scorer.source(one) for one in inputs])
        assert torch.allclose(found, torch.stack(expected), atol=1e-6)
        scorer.reset([0, 1], [prompt] * 2)


def test_copies_of_a_source_share_its_keys_and_values() -> None:
    """A source that is passed twice in a call is copied for each sequence."""
    decoder = Decoder(tiny_seq2seq("bart"), engine=True)
    (scorer,) = decoder.encoders()
    assert isinstance(scorer, FusedSeq2SeqScorer)
    source, held = outpace.Source(sources("bart", 40)[0]), set[int]()
    for _ in decoder.stream([source, source], max_new_tokens=3, temperature=0):
        held.add(scorer.sources.blocks_in_use)
    assert max(held) == -(-40 // scorer.sources.page)
    assert scorer.sources.blocks_in_use == 0


def test_a_source_that_does_not_fit_leaves_no_blocks_behind() -> None:
    scorer = FusedSeq2SeqScorer(tiny_seq2seq("bart"))
    long, short = (scorer.source(one) for one in sources("bart", 100, 30))
    block = scorer.sources.page * scorer.sources.bytes_per_token
    scorer.sources.max_bytes = 4 * block
    scorer.prepare(1, 8)
    with pytest.raises(MemoryError):
        scorer.encode_sources([0], [long], 8)
    assert scorer.sources.blocks_in_use == 0
    scorer.encode_sources([0], [short], 8)
    assert scorer.sources.blocks_in_use == 2


def test_requests_wait_for_the_memory_of_their_sources() -> None:
    model, inputs = tiny_seq2seq("bart"), sources("bart", 43, 41, 40, 42)
    expected = [greedy_of(model, source, 6) for source in inputs]
    decoder = Decoder(model, engine=True, kv_cache_bytes=2 * 10 * 16 * 512)
    outs = decoder.generate(inputs, temperature=0, max_new_tokens=6)
    assert [out.token_ids for out in outs] == expected
    with pytest.raises(MemoryError, match="tokens of the encoder's input needs"):
        Decoder(model, engine=True, kv_cache_bytes=2 * 3 * 16 * 512).generate(inputs[0], max_new_tokens=6)


def test_source_beyond_the_longest_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.fused_seq2seq.LONGEST_SOURCE", 40)
    decoder = Decoder(tiny_seq2seq("t5"), engine=True)
    with pytest.raises(ValueError, match="got 41 tokens; it must have at most 40"):
        decoder.generate([5] * 41, max_new_tokens=2)
    assert len(decoder.generate([5] * 40, max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize(
    ("family", "name"), [("t5", "relative_attention_bias"), ("whisper", "final_layer_norm")]
)
def test_changed_weights_take_effect(family: str, name: str) -> None:
    model, source = tiny_seq2seq(family), sources(family, 9)[0]
    first = Decoder(model, engine=True)
    first.generate(source, temperature=0, max_new_tokens=12)
    with torch.no_grad():
        for module_name, module in model.get_decoder().named_modules():
            if module_name.endswith(name):
                module.weight.normal_(std=3.0, generator=torch.Generator().manual_seed(1))
    reference = tiny_seq2seq(family)
    reference.load_state_dict(model.state_dict())
    expected = greedy_of(reference, source, 12)
    assert first.generate(source, temperature=0, max_new_tokens=12).token_ids == expected
    second = Decoder(model, engine=True)  # which computes anew what both share
    assert second.generate(source, temperature=0, max_new_tokens=12).token_ids == expected


def test_a_scorer_is_fused_where_it_can_be() -> None:
    assert isinstance(scorer_of(tiny_seq2seq("t5"), fused=True), FusedSeq2SeqScorer)
    assert isinstance(scorer_of(tiny_seq2seq("t5")), Seq2SeqScorer)
    model = tiny_seq2seq("marian")
    model.get_decoder().layers[0].fc1.register_forward_hook(lambda *_: None)
    assert why_not_fused(model) == "has hooks on its layers"
    assert isinstance(scorer_of(model, fused=True), Seq2SeqScorer)
    decoder = Decoder(model, engine=True)
    assert "has an encoder and has hooks on its layers" in decoder.describe()


def test_a_hook_on_the_encoder_changes_nothing() -> None:
    """The encoder runs as it is, for instance with the cache that transcription puts on it."""
    model, source = tiny_seq2seq("whisper"), sources("whisper", 4)[0]
    expected = greedy_of(model, source, 8)
    decoder = Decoder(model, engine=True)
    for _ in range(2):
        assert decoder.generate(source, temperature=0, max_new_tokens=8).token_ids == expected
        assert decoder.executor.name == "graph"
        model.get_encoder().register_forward_hook(lambda *_: None)


def test_activations_without_kernels_are_named_on_a_gpu() -> None:
    class OnGpu(torch.Tensor):
        """Weights that say they are on a GPU."""

        device = torch.device("cuda")

    model = tiny_seq2seq("bart", activation_function="quick_gelu")
    assert kind_of(activation_of(model)) == 0
    assert kind_of(activation_of(tiny_seq2seq("marian"))) == 1
    model.get_input_embeddings = lambda: SimpleNamespace(weight=torch.zeros(1).as_subclass(OnGpu))
    assert why_not_fused(model) == "has an activation without kernels (QuickGELUActivation)"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels as on a GPU, in Triton's interpreter if there is none, with small ranges and pages."""
    ranges = pytest.importorskip("outpace.models.kernels.ranges", reason="needs triton", exc_type=ImportError)
    monkeypatch.setattr(ranges, "MIN_RANGE", (16, 16))
    monkeypatch.setattr(ranges, "BLOCK", 16)
    monkeypatch.setattr("outpace.models.fused_scorer.PAGE", 16)
    monkeypatch.setattr("outpace.models.fused_stack.has_kernels", lambda device, dtype: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", tiers.sized(["mt5", "whisper"], list(SEQ2SEQ)))
def test_the_kernels_score_as_the_transformers_model(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("outpace.models.kernels.product.MAX_ROWS", 8)  # so that a prompt has many rows
    monkeypatch.setattr("outpace.models.fused_stack.MAX_QUERY_BYTES", 512)  # and needs several launches
    model = tiny_seq2seq(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # of norms, or a bias
                parameter.add_(0.3 * torch.randn_like(parameter))
    reference = copy.deepcopy(model)
    scorer = FusedSeq2SeqScorer(model.to(DEVICE))
    assert scorer.has_kernels
    inputs = sources(family, 21, 3)
    texts = [[1, *range(10, 10 + n)] for n in (9, 2)]
    scorer.prefill([0, 1], texts, [scorer.source(one) for one in inputs])
    new = torch.randint(V, (2, 3), generator=torch.Generator().manual_seed(1))
    scorer.score([0, 1], new.flip(0).to(DEVICE))  # is rejected
    found = scorer.score([0, 1], new.to(DEVICE)).cpu()
    for row in range(2):
        expected = transformers_logits(reference, inputs[row], [*texts[row], *new[row].tolist()])
        assert torch.allclose(found[row], expected[len(texts[row]) :], atol=1e-3)


@pytest.mark.usefixtures("kernels")
def test_prompts_of_a_batch_that_need_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.fused_stack.MAX_QUERY_BYTES", 4 * 8 * 4)  # four queries
    model = tiny_seq2seq("bart", decoder_layers=1)
    reference, inputs = copy.deepcopy(model), sources("bart", 5, 9)
    scorer = FusedSeq2SeqScorer(model.to(DEVICE))
    texts = [[1, *range(5, 14)], [1, *range(20, 29)]]
    found = scorer.prefill([0, 1], texts, [scorer.source(one) for one in inputs]).cpu()
    for row in range(2):
        expected = transformers_logits(reference, inputs[row], texts[row])[-1]
        assert torch.allclose(found[row], expected, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_scorers_of_one_model_follow_its_weights() -> None:
    """The kernels hold products of a norm's weights and the weights after it."""
    model, source, ids = tiny_seq2seq("whisper"), sources("whisper", 3)[0], torch.tensor([[4, 5]])
    first = FusedSeq2SeqScorer(model.to(DEVICE))
    with torch.no_grad():
        model.get_decoder().layers[0].encoder_attn_layer_norm.bias.add_(1.0)
    second = FusedSeq2SeqScorer(model)
    assert first.fused is second.fused
    expected = transformers_logits(copy.deepcopy(model).cpu(), source, [1, 4, 5])[1:]
    for scorer in (second, first):
        scorer.prefill([0], [[1]], [scorer.source(source)])
        assert torch.allclose(scorer.score([0], ids.to(DEVICE)).cpu()[0], expected, atol=1e-3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.full
@pytest.mark.parametrize("family", SEQ2SEQ)
def test_kernels_decode_a_batch_with_drafts(family: str) -> None:
    inputs = sources(family, 7, 3)
    model = tiny_seq2seq(family, decoder_layers=1, num_decoder_layers=1)
    expected = [greedy_of(model, source, 6) for source in inputs]
    draft = tiny_seq2seq(family, seed=1, decoder_layers=1, num_decoder_layers=1)
    decoder = Decoder(model.to(DEVICE), draft.to(DEVICE), num_draft_tokens=Fixed(2), engine=True)
    outs = decoder.generate(inputs, temperature=0, max_new_tokens=6)
    assert [out.token_ids for out in outs] == expected


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_the_graph_executor_decodes_as_transformers_does(family: str) -> None:
    inputs = sources(family, 7, 3, 12)
    expected = [greedy_of(tiny_seq2seq(family), source, 12) for source in inputs]
    drafts: list[Any] = [tiny_seq2seq(family), tiny_seq2seq(family, seed=3), "lookup", None]
    for draft in drafts:
        decoder = Decoder(
            tiny_seq2seq(family), draft, engine=True, num_draft_tokens=None if draft is None else Fixed(3)
        )
        assert decoder.executor.name == "graph"
        for batch_size in (None, 2):
            outs = decoder.generate(inputs, temperature=0, max_new_tokens=12, batch_size=batch_size)
            assert [out.token_ids for out in outs] == expected
        baseline = Decoder(tiny_seq2seq(family))
        options: dict[str, Any] = {"seed": [1, 2, 3], "n": 2, "max_new_tokens": 8, "temperature": 1.0}
        texts = [out.token_ids for out in baseline.generate(inputs, **options)]
        assert [out.token_ids for out in decoder.generate(inputs, **options)] == texts


def test_a_draft_shares_the_targets_encoder_if_it_is_equal() -> None:
    target, draft = tiny_seq2seq("whisper"), tiny_seq2seq("whisper", seed=3)
    draft.get_encoder().load_state_dict(target.get_encoder().state_dict())
    decoder = Decoder(target, draft, engine=True, num_draft_tokens=Fixed(2))
    first, second = decoder.encoders()
    assert first.encoder is second.encoder
    source = first.source(sources("whisper", 7)[0])
    decoder.generate(source, temperature=0, max_new_tokens=6)
    assert len(source.states) == 1


def texts_are_transformers(family: str) -> bool:
    """Return whether a ragged batch with rejected drafts, whose draft has another encoder, is right."""
    inputs = sources(family, 7, 3, 12)
    expected = [greedy_of(tiny_seq2seq(family), source, 12) for source in inputs]
    decoder = Decoder(
        tiny_seq2seq(family), tiny_seq2seq(family, seed=3), engine=True, num_draft_tokens=Fixed(3)
    )
    outs = decoder.generate(inputs, temperature=0, max_new_tokens=12)
    return [out.token_ids for out in outs] == expected


def cross_attention_reads_the_neighbours_source(patch: pytest.MonkeyPatch) -> None:
    honest = FusedSeq2SeqScorer.pages

    def pages(self: FusedSeq2SeqScorer, slots: torch.Tensor | int) -> SourcePages:
        found = honest(self, slots)
        source = dataclasses.replace(found.source, table=found.source.table.roll(1, 0))
        return dataclasses.replace(found, source=source, lengths=found.lengths.roll(1, 0))

    patch.setattr(FusedSeq2SeqScorer, "pages", pages)


def a_source_ends_one_token_early(patch: pytest.MonkeyPatch) -> None:
    honest = FusedSeq2SeqScorer.pages

    def pages(self: FusedSeq2SeqScorer, slots: torch.Tensor | int) -> SourcePages:
        found = honest(self, slots)
        return dataclasses.replace(found, lengths=(found.lengths - 1).clamp(min=1))

    patch.setattr(FusedSeq2SeqScorer, "pages", pages)


def the_draft_encodes_for_the_target(patch: pytest.MonkeyPatch) -> None:
    def share_encoder(self: FusedSeq2SeqScorer, other: FusedSeq2SeqScorer) -> bool:
        other.encoder = self.encoder = self.own_encoder
        return True

    patch.setattr(EncoderScorer, "share_encoder", share_encoder)


def relative_bias_counts_rejected_tokens(patch: pytest.MonkeyPatch) -> None:
    """Distances are those from the end of the last step, as if nothing had been rolled back."""
    honest = FusedStack._with_pytorch

    def attention(self: FusedStack, ids: Any, positions: torch.Tensor, pages: Any) -> Any:
        bias = self.bias
        assert bias is not None
        shift = ids.shape[1] - 1
        self.bias = torch.cat((bias[shift:], bias[-1:].expand(shift, -1)))
        try:
            return honest(self, ids, positions, pages)
        finally:
            self.bias = bias

    patch.setattr(FusedStack, "_with_pytorch", attention)


@pytest.mark.parametrize(
    ("plant", "family"),
    [
        (cross_attention_reads_the_neighbours_source, "whisper"),
        (a_source_ends_one_token_early, "bart"),
        (the_draft_encodes_for_the_target, "marian"),
        (relative_bias_counts_rejected_tokens, "t5"),
    ],
)
def test_a_planted_fault_is_caught_by_the_texts(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], family: str
) -> None:
    assert texts_are_transformers(family)
    plant(monkeypatch)
    assert not texts_are_transformers(family)


def test_a_draft_models_encoder_runs_when_it_first_drafts() -> None:
    decoder = Decoder(tiny_seq2seq("t5"), tiny_seq2seq("t5", seed=4), engine=True, num_draft_tokens=Fixed(2))
    source = outpace.Source([5, 6, 7, 8])
    expected = Decoder(tiny_seq2seq("t5")).generate(source, temperature=0, max_new_tokens=9)
    assert decoder.drafter is not None
    scorer = decoder.drafter.scorer
    assert isinstance(scorer, FusedSeq2SeqScorer)
    none = decoder.generate(source, temperature=0, max_new_tokens=9, num_draft_tokens=0)
    assert scorer.num_unencoded(source) == 4
    some = decoder.generate(source, temperature=0, max_new_tokens=9)
    assert scorer.num_unencoded(source) == 0
    assert none.token_ids == some.token_ids == expected.token_ids
