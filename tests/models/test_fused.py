"""Fused models score as the Transformers models that they are made from."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from outpace.models.fused import FAMILIES, FusedModel, why_not
from outpace.models.fused_scorer import FusedScorer
from outpace.models.paged import PagedCache, Pages
from tests import tiers
from tests.tiny import GROUPED, V, greedy, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROTARY: dict[str, Any] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def transformers_logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def cache_of(fused: FusedModel, rows: int, tokens: int) -> PagedCache:
    """Return a KV cache with memory for sequences in the first slots."""
    cache = PagedCache(fused.shape, fused.device, tokens, page=16, kernels=fused.has_kernels)
    for slot in range(rows):
        cache.open(slot, [])
    cache.reserve(range(rows), [tokens] * rows)
    return cache


def pages_of(fused: FusedModel, rows: int, tokens: int) -> Pages:
    return cache_of(fused, rows, tokens).pages(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ragged_rows_score_as_the_transformers_model(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    texts = [torch.randint(V, (n,)) for n in (31, 12, 20)]
    expected = [transformers_logits_of(model, text) for text in texts]
    fused = FusedModel(model)
    cache = cache_of(fused, 3, 40)
    starts = torch.tensor([len(text) - 5 for text in texts])
    for slot, (text, start) in enumerate(zip(texts, starts.tolist(), strict=True)):
        fused.fill(text[None, :start], torch.arange(start)[None], cache.pages(torch.tensor([slot])))
    last = torch.stack([text[-5:] for text in texts])
    found = fused.logits(last, starts[:, None] + torch.arange(5), cache.pages(3))
    for row in range(3):
        assert torch.allclose(found[row], expected[row][-5:], atol=1e-5 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_logits(family: str) -> None:
    model = tiny(family)
    texts = [torch.randint(V, (n,)) for n in (20, 7, 13)]
    expected = torch.stack([transformers_logits_of(model, text)[-1] for text in texts])
    fused = FusedModel(model)
    ids, counts = torch.zeros(3, 20, dtype=torch.int64), torch.tensor([len(text) for text in texts])
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    positions = torch.arange(20).expand(3, 20).where(torch.arange(20) < counts[:, None], -1)
    found = fused.last_logits(ids, positions, pages_of(fused, 3, 32), counts)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_draft_tokens_do_not_change_later_logits(family: str) -> None:
    model = tiny(family)
    text = torch.randint(V, (20,))
    expected = transformers_logits_of(model, text)
    fused = FusedModel(model)
    pages = pages_of(fused, 1, 32)
    fused.logits(text[None, :10], torch.arange(10)[None], pages)
    wrong = (text[None, 10:16] + 1) % V
    fused.logits(wrong, torch.arange(10, 16)[None], pages)
    found = fused.logits(text[None, 10:], torch.arange(10, 20)[None], pages)
    assert torch.allclose(found[0], expected[10:], atol=1e-5)


@pytest.mark.parametrize("rotary", ROTARY)
def test_scaled_rotary_embeddings_equal_the_models(rotary: str) -> None:
    model = tiny(rope_parameters=ROTARY[rotary])
    text = torch.randint(V, (60,))
    expected = transformers_logits_of(model, text)
    fused = FusedModel(model)
    found = fused.logits(text[None], torch.arange(60)[None], pages_of(fused, 1, 64))
    assert torch.allclose(found[0], expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_still_works_and_shares_its_weights(family: str) -> None:
    model = tiny(family, attention_bias=True)
    text = torch.randint(V, (20,))
    expected = transformers_logits_of(model, text)
    with torch.inference_mode():
        fused = FusedModel(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=text[None], use_cache=False).logits[0], expected)
    assert model.model.layers[0].self_attn.q_proj.weight.requires_grad
    attention = model.model.layers[0].self_attn
    whole = fused.layers[0].qkv.weight.untyped_storage().data_ptr()
    for one in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert one.weight.untyped_storage().data_ptr() == whole
    found = fused.logits(text[None], torch.arange(20)[None], pages_of(fused, 1, 32))
    assert torch.allclose(found[0], expected, atol=1e-5)


def test_why_not_gives_the_reason_for_unsupported_models() -> None:
    assert "family" in (why_not(tiny("gpt2")) or "")
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "depend on the sequence" in (why_not(tiny(rope_parameters=dynamic)) or "")
    mixed = tiny()
    mixed.lm_head.half()
    assert "several dtypes" in (why_not(mixed) or "")
    hooked = tiny()
    hooked.lm_head.register_forward_hook(lambda *args: None)
    assert "hooks" in (why_not(hooked) or "")
    with pytest.raises(ValueError, match="another family"):
        FusedModel(tiny("opt"))
    assert why_not(tiny(**GROUPED)) is None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels as on a GPU, in Triton's interpreter if there is none, with small ranges and pages."""
    ranges = pytest.importorskip("outpace.models.kernels.ranges", reason="needs triton", exc_type=ImportError)
    monkeypatch.setattr(ranges, "MIN_RANGE", (16, 16))
    monkeypatch.setattr(ranges, "BLOCK", 16)
    monkeypatch.setattr("outpace.models.fused_scorer.PAGE", 16)
    for module in ("fused", "choice"):
        monkeypatch.setattr(f"outpace.models.{module}.has_kernels", lambda device, dtype: True)


def both_caches(fused: FusedModel, rows: int, tokens: int) -> tuple[PagedCache, PagedCache]:
    """Return a KV cache that kernels read, and one that PyTorch's operations read."""
    with_kernels = cache_of(fused, rows, tokens)
    fused.has_kernels = False
    without = cache_of(fused, rows, tokens)
    fused.has_kernels = True
    return with_kernels, without


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "rows"),
    tiers.sized([("gemma", "few"), ("qwen3", "many")], list(itertools.product(FAMILIES, ["few", "many"]))),
)
def test_the_kernels_score_as_pytorch_operations_do(
    monkeypatch: pytest.MonkeyPatch, family: str, rows: str
) -> None:
    if rows == "many":
        monkeypatch.setattr("outpace.models.kernels.product.MAX_ROWS", 4)
    fused = FusedModel(tiny(family, attention_bias=True).to(DEVICE))
    text = torch.randint(V, (2, 26), device=DEVICE)
    starts = torch.tensor([[20], [7]], device=DEVICE)
    new, positions = text[:, 20:26], starts + torch.arange(6, device=DEVICE)
    found = []
    for cache, with_kernels in zip(both_caches(fused, 2, 40), (True, False), strict=True):
        fused.has_kernels = with_kernels
        fused.fill(text[:, :20], torch.arange(20, device=DEVICE).expand(2, 20), cache.pages(2))
        logits = [fused.logits(new, positions, cache.pages(2))]
        logits.append(fused.logits(new[:, :1], starts + 6, cache.pages(2)))  # reads what was written
        found.append(torch.cat(logits, dim=1))
    assert torch.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", tiers.sized(FAMILIES[-2:], FAMILIES))
def test_prefill_with_kernels_equals_prefill_without(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("outpace.models.fused.MAX_QUERY_BYTES", 1024)  # more queries than one kernel takes
    fused = FusedModel(tiny(family).to(DEVICE))
    text, positions = torch.randint(V, (2, 30), device=DEVICE), torch.arange(30, device=DEVICE).expand(2, 30)
    new, after = torch.randint(V, (2, 1), device=DEVICE), torch.full((2, 1), 30, device=DEVICE)
    found = []
    for cache, with_kernels in zip(both_caches(fused, 2, 40), (True, False), strict=True):
        fused.has_kernels = with_kernels
        logits = [fused.logits(text, positions, cache.pages(2)), fused.logits(new, after, cache.pages(2))]
        found.append(torch.cat(logits, dim=1))
    assert torch.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_the_kernels_of_a_prefill_score_every_token_of_a_prompt(tokens: int) -> None:
    model = tiny("qwen3")
    prompt = torch.randint(V, (8 + tokens,)).tolist()
    expected = transformers_logits_of(model, torch.tensor(prompt))
    scorer = FusedScorer(model.to(DEVICE))
    assert scorer.fused.has_kernels
    scorer.cache.open(0, prompt[:1])
    found = torch.cat([scorer.append_scored(0, part) for part in (prompt[:8], prompt[8:])])
    assert torch.allclose(found.cpu(), expected, atol=1e-4)
    assert scorer.cache.length(0) == 8 + tokens


@pytest.mark.usefixtures("kernels")
def test_kernels_and_graphs_continue_texts_greedily() -> None:
    prompts = [[1, 2, 3], [4]]
    expected = [greedy(tiny(), prompt, 4) for prompt in prompts]
    scorer = FusedScorer(tiny().to(DEVICE))
    assert scorer.fused.has_kernels
    for length in (4, 1):  # on a GPU, graphs are replayed the second time
        for slot, prompt in zip((3, 1), prompts, strict=True):
            scorer.cache.open(slot, prompt[:1])
        found = scorer.greedy([3, 1], prompts, length)
        assert found[..., 0].tolist() == [text[:length] for text in expected]
        scorer.reset([3, 1])


@pytest.mark.full
@pytest.mark.usefixtures("kernels")
def test_a_batch_that_shares_a_prefix_is_decoded_as_without_a_batch() -> None:
    """The sequences share blocks of the KV cache up to their first own token."""
    model = tiny()
    prefix = torch.randint(V, (20,)).tolist()
    prompts = [[*prefix, 1, 2, 3], [*prefix, 4], [*prefix, 5, 6], [*prefix, 4]]
    expected = [greedy(model, prompt, 4) for prompt in prompts]
    scorer = FusedScorer(model.to(DEVICE))
    assert scorer.fused.has_kernels
    first = scorer.prefill([0], prompts[:1])
    logits = torch.cat((first, scorer.prefill([1, 2, 3], prompts[1:])))
    first_blocks, second_blocks = scorer.cache.table[:4, :2].T.tolist()
    assert len(set(first_blocks)) == 1
    assert len(set(second_blocks)) == 3  # equal prompts share this one, too
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(4):
        tokens = logits.argmax(-1)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        logits = scorer.score(range(4), tokens[:, None])[:, 0]
        for slot in range(4):
            scorer.cache.commit(slot, 1)
    assert texts == expected
    assert len(set(scorer.cache.table[:4, 1].tolist())) == 4


@pytest.mark.usefixtures("kernels")
def test_float16_error_is_close_to_that_of_transformers() -> None:
    model = tiny("qwen3").half().to(DEVICE)  # the interpreter's products know no bfloat16
    exact = tiny("qwen3").half().double().to(DEVICE)
    text = torch.randint(V, (1, 20), device=DEVICE)
    expected = transformers_logits_of(exact, text[0])[14:]
    fused = FusedModel(model)
    pages = pages_of(fused, 1, 32)
    fused.fill(text[:, :14], torch.arange(14, device=DEVICE)[None], pages)
    found = fused.logits(text[:, 14:], torch.arange(14, 20, device=DEVICE)[None], pages)[0]
    transformers_logits = transformers_logits_of(model, text[0])[14:]
    assert (found - expected).abs().mean() < 1.5 * (transformers_logits - expected).abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_argmax_differs_only_at_near_ties(family: str) -> None:
    """The argmax differs from Transformers' only where two logits are within rounding of each other."""
    model = tiny(family).bfloat16().cuda()
    exact = tiny(family).bfloat16().double().cuda()
    texts = torch.randint(V, (8, 64), device="cuda")
    expected = torch.stack([transformers_logits_of(exact, text) for text in texts])
    transformers_logits = torch.stack([transformers_logits_of(model, text) for text in texts])
    fused = FusedModel(model)
    pages = pages_of(fused, 8, 64)
    found = torch.cat(
        [
            fused.logits(texts[:, i : i + 4], torch.arange(i, i + 4, device="cuda").expand(8, 4), pages)
            for i in range(0, 64, 4)
        ],
        dim=1,
    )
    rounding = (transformers_logits - expected).abs().max()
    top = expected.topk(2).values
    other = found.argmax(-1) != transformers_logits.argmax(-1)
    print(f"{family}: {int(other.sum())} of {other.numel()} tokens differ")
    assert ((top[..., 0] - top[..., 1])[other] <= 2 * rounding).all()


COMPILE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outpace.models.kernels import prefill, ranges
from outpace.models.kernels import product as products
from outpace.models.kernels.attention import attend
from outpace.models.kernels.prefill import attend_many, store
from outpace.models.kernels.product import product
from outpace.models.kernels.rows import norm_kernel

def build(kernel, pointers, missing, warps, stages, max_shared, **constants):
    # names of Triton's generated launcher, which an argument would overwrite
    assert not {"params", "specialization", "options"} & set(kernel.arg_names), kernel.arg_names
    types, fixed, known = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if kernel.params[i].is_constexpr or name in missing:
            types[name] = "constexpr"  # of the same name as a constant beside the kernel, where none is given
            fixed[(i,)] = constants[name] if name in constants else kernel.fn.__globals__.get(name)
        else:
            float32 = name in ("eps", "scale", "headroom", "next_headroom")
            types[name] = pointers.get(name) or ("fp32" if float32 else "i32")
            known_multiple = name in ("N", "K", "layer_start") or name.endswith("stride")
            if (name in pointers or known_multiple) and not kernel.params[i].do_not_specialize:
                known[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=known)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= max_shared, (constants, built.metadata.shared, max_shared)
    print(kernel.__name__)

names = ("x", "weight", "bias", "scaled", "residual", "out", "qkv", "cos", "sin", "q_norm", "k_norm")
wide = {name: "*bf16" for name in names}
sums = ("centers", "squares", "sums", "next_squares", "next_sums")
more = {"scale": "*bf16"} | {name: "*fp32" for name in sums}
none = ("bias", "residual", "scale", "scaled", *sums)
rms = ("centers", "sums", "next_sums")
kinds = (
    (0, False, 4096, none, True), (1, True, 11008, rms, True), (2, True, 5504, ("bias", *rms), False),
    (0, False, 6144, none, True), (3, False, 5120, (), True),
)
for activation, gate, N, missing, overlaps in kinds:
    for BM in map(int, sys.argv[1:]):
        BN, BK, warps, stages, prefetch = products.shape_of(BM, N, torch.bfloat16, gate)
        build(product, wide | more, missing, warps, stages,
            products.shared(BM, BN, BK, stages, torch.bfloat16, gate) + 4096,
            BM=BM, BN=BN, BK=BK, PARTS=64, ACTIVATION=activation, GATE=gate, SHIFTED=False, PRECISION="tf32",
            PREFETCH=prefetch if overlaps else -1)
build(norm_kernel, wide, (), 4, 3, 1 << 16, BK=2048, CENTERED=True, OVERLAPS=True)
others = {"positions": "*i64", "table": "*i64", "ranges": "*i64", "parts": "*fp32", "counters": "*i32"}
others["bias"] = "*fp32"
sizes = {"D": 64, "HALF": 32, "WIDTH": 64, "PAGE": 128, "SHIFTED": False, "OVERLAPS": True}
unrotated = ("cos", "sin", "q_norm", "k_norm")
biases = 4 * 16 * 64  # bytes
build(attend, wide | others, unrotated, 4, 3, ranges.shared(64, 16, 128, 3) + biases, ROWS=16, NEW=32,
    SAME_BITS=True, BLOCK=64, QUERIES=8, PRECISION="tf32", **sizes)
build(store, wide | others, unrotated, 4, 3, 1 << 16, **sizes)
no_norms = ("bias", "q_norm", "k_norm")
for D, ROWS, BLOCK, missing in ((128, 16, 64, ("bias",)), (128, 16, 128, no_norms), (256, 32, 64, ("bias",))):
    overlaps = missing != no_norms
    sizes = {"D": D, "HALF": D // 2, "WIDTH": D, "PAGE": 128, "SHIFTED": False, "OVERLAPS": overlaps}
    build(attend, wide | others, missing, 4, 3, ranges.shared(BLOCK, ROWS, 2 * D, 3), ROWS=ROWS, NEW=32,
        SAME_BITS=ROWS < 32 or D < 256, BLOCK=BLOCK, QUERIES=8, PRECISION="tf32", **sizes)
    build(store, wide | others, missing, 4, 3, 1 << 16, **sizes)
    build(attend_many, wide | others, missing, 4 if D <= prefill.WIDE else 8, 2,
        ranges.shared(prefill.BLOCK, 32, 2 * D, 2), ROWS=32, PRECISION="tf32", **sizes)
"""


def test_the_kernels_compile_for_a_gpu_without_having_one() -> None:
    pytest.importorskip("triton", reason="needs triton")
    block_rows = ["8", "32"] if tiers.full else ["32"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *block_rows],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = done.stdout.split()
    assert [built.count(name) for name in ("attend", "store", "attend_many")] == [4, 4, 3]
