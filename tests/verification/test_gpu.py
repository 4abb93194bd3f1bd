"""On a CUDA device: the same random words, decisions and distributions, and no synchronization with the host.

Run with ``pytest -m gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper

import outpace
from outpace.sampling import Prefix, SamplingParams, adjust, random
from outpace.sampling.random import Stream
from tests.statistical.checks import Case, check_joint, check_text
from tests.tiny import tiny
from tests.verification.test_eager import RULES, blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture
def _no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_random_words_and_uniforms_equal_the_cpus() -> None:
    seed, position, start = torch.arange(40)[:, None] * 2**33 - 7, torch.arange(50), torch.tensor(3)
    for stream in Stream:
        nodes = torch.arange(50) % 3
        cpu = random.words(random.key(seed, position, start, stream, 1, nodes), blocks=9)
        there = seed.cuda(), position.cuda(), start.cuda()
        gpu = random.words(random.key(*there, stream, 1, nodes.cuda()), blocks=9)
        assert torch.equal(cpu, gpu.cpu())
        uniform = random.uniform(seed.cuda(), position.cuda(), start.cuda(), stream)
        assert torch.equal(random.uniform(seed, position, start, stream), uniform.cpu())
    noise = random.gumbel(seed.cuda(), position.cuda(), 1000).cpu()
    torch.testing.assert_close(noise, random.gumbel(seed, position, 1000), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_decisions_equal_the_cpus(rule: str, soft: bool) -> None:
    tokens, draft, target = blocks(300, 5, 1000, masked=0.3)
    lengths = torch.arange(300) % 6
    seed, position = torch.arange(300), torch.arange(300) * 3
    cpu = outpace.verify(
        tokens, draft if soft else None, target, rule=rule, seed=seed, position=position, lengths=lengths
    )
    gpu = outpace.verify(
        tokens.cuda(),
        draft.cuda() if soft else None,
        target.cuda(),
        rule=rule,
        seed=seed.cuda(),
        position=position.cuda(),
        lengths=lengths.cuda(),
    )
    assert torch.equal(cpu.accepted, gpu.accepted.cpu())
    assert torch.equal(cpu.next_token, gpu.next_token.cpu())


@pytest.mark.usefixtures("_no_host_sync")
@pytest.mark.parametrize("rule", RULES)
def test_verify_never_synchronizes_with_the_host(rule: str) -> None:
    B, g, V = 4, 3, 500
    tokens = torch.zeros(B, g, dtype=torch.int64, device="cuda")
    draft, target = torch.randn(B, g, V, device="cuda"), torch.randn(B, g + 1, V, device="cuda")
    lengths = torch.full((B,), 2, device="cuda")
    outpace.verify(tokens, draft, target, rule=rule, seed=1, position=2)
    outpace.verify(
        tokens, draft, target, rule=rule, seed=torch.arange(B), position=[1, 2, 3, 4], lengths=[0, 1, 2, 3]
    )
    outpace.verify(tokens, draft, target, rule=rule, prefix=[[1], [2, 3], [], [4]], lengths=torch.arange(B))
    rows = [
        SamplingParams(temperature=0.5, top_k=9),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
    ]
    penalties = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.2, logit_bias={3: 1.0}
    )
    prefix = Prefix(torch.zeros(B, 6, dtype=torch.int64, device="cuda"))
    lenience = 0.5 if rule == "token" else 1.0
    for sampling in (rows, penalties):
        outpace.verify(
            tokens,
            draft,
            target,
            rule=rule,
            lenience=lenience,
            seed=[1, 2, 3, 4],
            lengths=lengths,
            sampling=sampling,
            draft_sampling=sampling,
            prefix=prefix,
        )


@pytest.mark.usefixtures("_no_host_sync")
def test_rows_out_of_range_are_flagged() -> None:
    tokens = torch.tensor([[1, 2], [1, 9], [1, 9], [-4, 0], [1, 2], [1, 2]]).pin_memory()
    lengths = torch.tensor([2, 2, 1, 2, 7, -3]).pin_memory()
    target = torch.zeros(6, 3, 5, device="cuda")
    for rule in RULES:
        for draft in (None, target[:, :2]):
            bad = outpace.verify(
                tokens.to("cuda", non_blocking=True),
                draft,
                target,
                rule=rule,
                seed=0,
                lengths=lengths.to("cuda", non_blocking=True),
            ).bad
            torch.cuda.set_sync_debug_mode("default")
            assert bad.tolist() == [False, True, False, True, True, True]
            torch.cuda.set_sync_debug_mode("error")


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.7])
def test_temperature_rounds_as_transformers_does(temperature: float) -> None:
    logits = torch.randn(2, 3, 5000, device="cuda")
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    assert torch.equal(adjust(logits, SamplingParams(temperature=temperature)), expected)


def test_adjusted_logits_equal_the_cpus() -> None:
    logits = 3 * torch.randn(4, 3, 5000)
    tied = logits.round()
    prefix, drafted = Prefix.of([[1, 2], [3], [4, 4, 4], [0]]), torch.randint(5000, (4, 2))
    gpu_prefix = Prefix.of([[1, 2], [3], [4, 4, 4], [0]], device="cuda")
    for sampling in (
        SamplingParams(top_k=50),
        SamplingParams(temperature=0),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25),
        [
            SamplingParams(top_k=5),
            SamplingParams(temperature=0),
            SamplingParams(min_p=0.3),
            SamplingParams(logit_bias={7: -torch.inf}),
        ],
    ):
        for z in (logits, tied):
            expected = adjust(z, sampling, prefix, drafted)
            assert torch.equal(expected, adjust(z.cuda(), sampling, gpu_prefix, drafted.cuda()).cpu())
    # Sums in another order may move the cut of top-p by at most one token per row.
    for z in (logits, tied):
        num_survivors = [adjust(x, SamplingParams(top_p=0.9)).isfinite().sum(-1).cpu() for x in (z, z.cuda())]
        assert (num_survivors[0] - num_survivors[1]).abs().max() <= 1


@pytest.mark.parametrize("rule", ["token", "block", "match", "rejection", "sigmoid(-2, 2)"])
def test_joint_distribution_is_exact_on_cuda(rule: str) -> None:
    for draft in ("soft", "point"):
        check_joint(Case(rule, 3, 2, draft=draft, ragged=True), device="cuda")
    if not rule.startswith("sigmoid"):
        check_text(rule, device="cuda")


@pytest.mark.parametrize("rule", ["token", "block", "match", "rejection"])
def test_generated_tokens_equal_the_cpus(rule: str) -> None:
    """Rows have different sampling parameters, and some are greedy. At most one text differs, by rounding.

    Both texts come from the eager executor. The graph executor drafts in the first step already.
    """
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9),
        SamplingParams(temperature=1.2, min_p=0.02, repetition_penalty=1.2),
        SamplingParams(temperature=0.0),
    ] * 4
    prompts = [[3 + i, 5, 7 + i] for i in range(len(samplings))]
    texts = []
    for device in ("cpu", "cuda"):
        models = tiny().to(device), tiny(seed=1).to(device)
        decoder = outpace.Decoder(*models, rule=rule, num_draft_tokens=outpace.Fixed(3), engine=False)
        outs = decoder.generate(prompts, samplings, max_new_tokens=24, seed=list(range(len(prompts))))
        texts.append([out.token_ids for out in outs])
        assert sum(out.stats.accepted_tokens for out in outs) > 0
    same = sum(one == other for one, other in zip(*texts, strict=True))
    assert same >= len(prompts) - 1
