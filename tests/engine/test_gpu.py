"""The decoder on a CUDA device generates the tokens of Transformers and passes the audit.

pytest -m gpu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import outpace
from outpace import Decoder, Fixed, Goodput, SamplingParams
from outpace.bench import cost
from outpace.bench.blocks import divide_phases, trace
from outpace.bench.prompts import Prompt
from outpace.models.fused import FAMILIES as FUSED
from outpace.policy import DraftLengthPolicy, Load
from tests.tiny import FAMILIES, SEQ2SEQ, V, byte_tokenizer, greedy_of, sources, tiny, tiny_seq2seq

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30]]


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return list(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_transformers(family: str, engine: bool) -> None:
    model = tiny(family).double().cuda()  # in double precision no tie is near
    expected = [greedy(model, prompt, 40) for prompt in PROMPTS]
    for drafter in (tiny(family, seed=1).double().cuda(), "lookup", outpace.RandomDrafter(V), None):
        decoder = Decoder(model, drafter, num_draft_tokens=Fixed(4), engine=engine)
        outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=40)
        assert [out.token_ids for out in outs] == expected


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_log_probabilities_of_prompts_are_those_of_transformers(family: str, engine: bool) -> None:
    model = tiny(family).cuda()
    prompts = [torch.randint(V, (n,)).tolist() for n in (3, 90, 1, 40)]
    decoder = Decoder(model, "lookup", num_draft_tokens=Fixed(3), engine=engine)
    for _ in range(2):  # the second time, graphs were captured and prefixes are cached
        outs = decoder.generate(prompts, temperature=0, max_new_tokens=8, prompt_logprobs=2)
        for prompt, out in zip(prompts, outs, strict=True):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt], device="cuda")).logits[0]
            exact = logits.double().log_softmax(-1)
            own = [float(exact[i, token]) for i, token in enumerate(prompt[1:])]
            assert out.prompt_logprobs is not None
            assert out.prompt_logprobs[1:] == pytest.approx(own, abs=0.02)
            assert len(out.token_ids) == 8


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_greedy_texts_of_encoder_decoders_are_those_of_transformers(family: str) -> None:
    model = tiny_seq2seq(family).double()
    prompts = sources(family, 7, 3, 12)
    prompts = [prompt.double() if isinstance(prompt, torch.Tensor) else prompt for prompt in prompts]
    expected = [greedy_of(model, prompt, 30) for prompt in prompts]  # on the CPU
    model.cuda()
    drafters: list[Any] = [
        tiny_seq2seq(family, seed=1).double().cuda(), model, "lookup", outpace.RandomDrafter(V),
        tiny().double().cuda(), None,
    ]  # fmt: skip
    for drafter in drafters:
        decoder = Decoder(model, drafter, num_draft_tokens=Fixed(4))
        for batch_size in (None, 2):
            outs = decoder.generate(prompts, temperature=0, max_new_tokens=30, batch_size=batch_size)
            assert [out.token_ids for out in outs] == expected


@pytest.mark.parametrize("family", FUSED)
def test_greedy_texts_with_kernels_are_those_of_transformers(family: str) -> None:
    model = tiny(family).cuda()
    expected = [greedy(model, prompt, 40) for prompt in PROMPTS]
    for drafter in (tiny(family, seed=1).cuda(), "lookup"):
        decoder = Decoder(model, drafter, num_draft_tokens=Fixed(4), engine=True)
        for batch_size in (None, 1, 2):
            outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=40, batch_size=batch_size)
            assert [out.token_ids for out in outs] == expected


def test_a_captured_prefill_changes_no_token() -> None:
    model = tiny(max_position_embeddings=1200).cuda()
    decoder = Decoder(model, tiny(seed=1, max_position_embeddings=1200).cuda(), num_draft_tokens=Fixed(2))
    for i, length in enumerate((20, 30, 100, 101, 700, 699, 20)):
        prompt = [(7 * i + 3 * j) % (V - 2) + 1 for j in range(length)]
        out = decoder.generate(prompt, temperature=0, max_new_tokens=30)
        assert out.token_ids == greedy(model, prompt, 30)
    captured = {key[2] for key in decoder.executor.graphs if key[0] == "prefill"}  # type: ignore[attr-defined]
    assert captured == {32, 128, 256, 512}


@pytest.mark.parametrize("engine", [False, True])
def test_match_generates_the_tokens_of_decoding_without_speculation(engine: bool) -> None:
    model = tiny().cuda()
    baseline = Decoder(model, rule="match").generate(PROMPTS, SamplingParams(), seed=3, max_new_tokens=40)
    drafters: list[Any] = [model, tiny(seed=1).cuda(), "lookup"]
    for drafter in drafters:
        outs = Decoder(model, drafter, rule="match", num_draft_tokens=Fixed(3), engine=engine).generate(
            PROMPTS, SamplingParams(), seed=3, max_new_tokens=40
        )
        assert [out.token_ids for out in outs] == [out.token_ids for out in baseline]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_up_to_seven_tokens_change_no_bit_of_a_sequence(temperature: float) -> None:
    """Rounding to bfloat16 would change other texts at near-ties."""
    model = tiny().bfloat16().cuda()
    prompts = [torch.randint(V, (n,)).tolist() for n in (5, 60, 126)]
    drafters = (None, 0), ("lookup", 3), ("lookup", 7), (tiny(seed=1).bfloat16().cuda(), 2)
    texts = []
    for draft, g in drafters:
        decoder = Decoder(model, draft, num_draft_tokens=Fixed(g))
        outs = [
            decoder.generate(prompt, temperature=temperature, seed=3, max_new_tokens=100, ignore_eos=True)
            for prompt in prompts
        ]
        texts.append([out.token_ids for out in outs])
    assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize("rule", ["token", "block"])
def test_almost_all_draft_tokens_of_the_target_itself_are_accepted(rule: str) -> None:
    """Rounding differs slightly between forward passes of one token and of four."""
    decoder = Decoder(tiny().cuda(), tiny().cuda(), rule=rule, num_draft_tokens=Fixed(3))
    outs = decoder.generate(PROMPTS, SamplingParams(repetition_penalty=1.2), seed=3, max_new_tokens=60)
    assert sum((out.stats for out in outs), outpace.Stats()).acceptance_rate > 0.99


def test_a_draft_on_another_device_works() -> None:
    model = tiny().double().cuda()
    out = Decoder(model, tiny(seed=1).double(), num_draft_tokens=Fixed(3)).generate(
        PROMPTS[1], temperature=0, max_new_tokens=30
    )
    assert out.token_ids == greedy(model, PROMPTS[1], 30)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_audit(dtype: torch.dtype, engine: bool) -> None:
    model = tiny(num_hidden_layers=3).to(dtype).cuda()
    draft = tiny(seed=1, num_hidden_layers=3).to(dtype).cuda()
    decoder = Decoder(model, draft, num_draft_tokens=Fixed(3), engine=engine)
    report = outpace.audit(decoder, PROMPTS, samples=1000, progress=False)
    assert report.passed, str(report)


class Alternating(Fixed):
    """A policy that chooses 0 for some steps, so that the draft model has to catch up."""

    def __init__(self) -> None:
        super().__init__(4)
        self.calls = 0

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        self.calls += 1
        # Seven numbers, so that calls of any number of steps get all of them
        return [(0, 0, 0, 4, 2, 0, 3)[self.calls % 7]] * len(slots)


@pytest.mark.parametrize("policy", [Goodput, Alternating])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_greedy_texts_do_not_depend_on_the_policy(
    policy: Callable[[], DraftLengthPolicy], batch_size: int | None
) -> None:
    model = tiny().double().cuda()
    expected = [greedy(model, prompt, 60) for prompt in PROMPTS]
    fitted = outpace.NGramDrafter.fit([*PROMPTS[1], *PROMPTS[0]] * 3, 2, V)
    drafters: list[Any] = [tiny(seed=1).double().cuda(), "lookup", outpace.RandomDrafter(V), fitted]
    for drafter in drafters:
        decoder = Decoder(model, drafter, num_draft_tokens=policy(), engine=True)
        outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=60, batch_size=batch_size)
        assert [out.token_ids for out in outs] == expected


def test_draft_model_catches_up_after_steps_without_draft_tokens() -> None:
    model = tiny().cuda()
    decoder = Decoder(model, model, num_draft_tokens=Alternating(), engine=True)
    outs = decoder.generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=100)
    assert sum((out.stats for out in outs), outpace.Stats()).acceptance_rate > 0.98


@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize("drafter", ["ngram", "random", "lookup", "model"])
def test_graph_executor_passes_the_audit_with_every_drafter(rule: str, drafter: str) -> None:
    drafters: dict[str, Any] = {
        "ngram": outpace.NGramDrafter.fit([*PROMPTS[1], *PROMPTS[0]] * 3, 2, V),
        "random": outpace.RandomDrafter(V),
        "lookup": "lookup",
        "model": tiny(seed=1).cuda(),
    }
    decoder = Decoder(
        tiny().cuda(), drafters[drafter], rule=rule, num_draft_tokens=Alternating(), engine=True
    )
    report = outpace.audit(decoder, PROMPTS, samples=1000, progress=False)
    assert report.passed, str(report)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_drafter_replays_graphs_of_its_model(batch: int, recwarn: pytest.WarningsRecorder) -> None:
    target, draft = (tiny(seed=seed, vocab_size=261).cuda() for seed in (0, 1))
    prompts, expected = PROMPTS[:batch], [greedy(target, prompt, 40) for prompt in PROMPTS[:batch]]
    drafter = outpace.TextDrafter(draft, byte_tokenizer(), byte_tokenizer())
    decoder = Decoder(target, drafter, byte_tokenizer(), num_draft_tokens=Fixed(3), engine=True)
    for _ in range(2):
        outs = decoder.generate(prompts, temperature=0, max_new_tokens=40)
        assert [out.token_ids for out in outs] == expected
        assert sum(out.stats.draft_tokens for out in outs) > 0
        decoder.release()
    assert not [one for one in recwarn if "captured" in str(one.message)]


def test_steps_are_timed_by_the_device() -> None:
    decoder = Decoder(tiny().cuda(), "lookup", engine=True)
    assert isinstance(decoder.policy, Goodput)
    for _ in range(3):
        decoder.generate(PROMPTS[0], SamplingParams(), seed=1, max_new_tokens=50)
    load = Load(1, executor="graph")
    seconds = decoder.policy.costs(load).baseline_seconds
    assert seconds is not None
    assert seconds > 0


def test_trace_of_graphs_is_divided_into_phases() -> None:
    decoder = Decoder(tiny().cuda(), tiny(seed=1).cuda(), num_draft_tokens=Fixed(3), engine=True)
    for _ in range(2):
        traced = trace(decoder, Prompt(PROMPTS[0], ""), SamplingParams(temperature=0), max_new_tokens=30)
    parts = cost.graph_phases(decoder, 3, context=16)
    assert parts is not None
    assert min(parts.draft, parts.target) > 0
    for step in divide_phases(traced["iterations"], parts):
        phases = step["phases"]
        assert phases["draft"] / phases["target"] <= parts.draft / parts.target * (1 + 1e-9)
        assert phases["verify"] >= 0


def test_nothing_is_drafted_for_a_single_token() -> None:
    model = tiny().cuda()
    decoder = Decoder(model, model, num_draft_tokens=Goodput(4), engine=True)
    decoder.generate(PROMPTS, temperature=0, max_new_tokens=100)
    outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=1)
    assert [out.stats.draft_tokens for out in outs] == [0, 0, 0]
    assert [out.token_ids for out in outs] == [greedy(model, prompt, 1) for prompt in PROMPTS]


KINDS = [
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.7, presence_penalty=0.3, top_k=9),
    SamplingParams(logit_bias={7: 3.0, 9: -2.0}, top_p=0.9),
    SamplingParams(min_p=0.05, allowed_token_ids=range(5, V, 2)),
    SamplingParams(processors=[lambda ids, scores: scores.roll(1, -1)]),
    SamplingParams(repetition_penalty=1.3, processors=[lambda ids, scores: scores + 1]),
]


@pytest.mark.parametrize("drafter", ["model", "lookup", None])
def test_all_kinds_of_requests_give_the_results_of_the_cpu(drafter: str | None) -> None:
    draft = tiny(seed=1).cuda() if drafter == "model" else drafter
    on_gpu = Decoder(tiny().cuda(), draft, num_draft_tokens=Fixed(3 if drafter else 0))
    on_cpu, prompts = Decoder(tiny()), [PROMPTS[i % len(PROMPTS)] for i in range(len(KINDS))]
    for some in (slice(0, 1), slice(0, 8), slice(2, 4), slice(6, 8)):
        for options in ({}, {"logprobs": 3}, {"scores": True, "logits": True}):
            found, expected = (
                decoder.generate(
                    prompts[some], KINDS[some], seed=list(range(8))[some], max_new_tokens=24, **options
                )
                for decoder in (on_gpu, on_cpu)
            )
            assert [out.token_ids for out in found] == [out.token_ids for out in expected]
            for one, other in zip(found, expected, strict=True):
                for name in ("logprobs", "scores", "logits"):
                    if (value := getattr(one, name)) is not None:
                        value, theirs = torch.as_tensor(value).cpu(), torch.as_tensor(getattr(other, name))
                        torch.testing.assert_close(value, theirs, rtol=1e-3, atol=1e-3)


def test_calls_inside_transformers_replay_graphs_and_repeat_after_manual_seed() -> None:
    model, draft = tiny().cuda(), tiny(seed=1).cuda()
    ids, texts = torch.tensor([PROMPTS[1]], device="cuda"), []
    stats = outpace.Stats()
    for _ in range(3):
        torch.manual_seed(5)
        texts.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=40, stats=stats,
                custom_generate=outpace.generate, draft=draft,
            )
        )  # fmt: skip
    assert all(torch.equal(texts[0], text) for text in texts)
    (kept,) = outpace.integrations.transformers._decoders._idle[model].values()
    assert "captured: g=" in kept.decoder.executor.describe()
