"""Fused models score as the Transformers models that they are made from."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from outpace.models.fused import FAMILIES, FusedModel, why_not
from tests import tiers
from tests.tiny import GROUPED, V, tiny

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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ragged_rows_score_as_the_transformers_model(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    texts = [torch.randint(V, (n,)) for n in (31, 12, 20)]
    expected = [transformers_logits_of(model, text) for text in texts]
    fused = FusedModel(model)
    cache = fused.allocate_cache(3, 40)
    starts = torch.tensor([len(text) - 5 for text in texts])
    for row, (text, start) in enumerate(zip(texts, starts.tolist(), strict=True)):
        part = fused.allocate_cache(1, 40)
        fused.logits(text[None, :start], torch.arange(start)[None], part)
        cache.keys[:, row], cache.values[:, row] = part.keys[:, 0], part.values[:, 0]
    last = torch.stack([text[-5:] for text in texts])
    found = fused.logits(last, starts[:, None] + torch.arange(5), cache)
    for row in range(3):
        assert torch.allclose(found[row], expected[row][-5:], atol=1e-5 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_draft_tokens_do_not_change_later_logits(family: str) -> None:
    model = tiny(family)
    text = torch.randint(V, (20,))
    expected = transformers_logits_of(model, text)
    fused = FusedModel(model)
    cache = fused.allocate_cache(1, 32)
    fused.logits(text[None, :10], torch.arange(10)[None], cache)
    wrong = (text[None, 10:16] + 1) % V
    fused.logits(wrong, torch.arange(10, 16)[None], cache)
    found = fused.logits(text[None, 10:], torch.arange(10, 20)[None], cache)
    assert torch.allclose(found[0], expected[10:], atol=1e-5)


@pytest.mark.parametrize("rotary", ROTARY)
def test_scaled_rotary_embeddings_equal_the_models(rotary: str) -> None:
    model = tiny(rope_parameters=ROTARY[rotary])
    text = torch.randint(V, (60,))
    expected = transformers_logits_of(model, text)
    fused = FusedModel(model)
    found = fused.logits(text[None], torch.arange(60)[None], fused.allocate_cache(1, 64))
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
    found = fused.logits(text[None], torch.arange(20)[None], fused.allocate_cache(1, 32))
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
    """Use the kernels as on a GPU, in Triton's interpreter if there is none, with small ranges and blocks."""
    attention = pytest.importorskip(
        "outpace.models.kernels.attention", reason="needs triton", exc_type=ImportError
    )
    monkeypatch.setattr(attention, "MIN_RANGE", 16)
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr("outpace.models.fused.has_kernels", lambda device, dtype: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("family", "rows"), tiers.each_value(FAMILIES, ["few", "many"]))
def test_the_kernels_score_as_pytorch_operations_do(
    monkeypatch: pytest.MonkeyPatch, family: str, rows: str
) -> None:
    if rows == "many":
        monkeypatch.setattr("outpace.models.kernels.product.MAX_ROWS", 4)
    model = tiny(family, attention_bias=True).to(DEVICE)
    text = torch.randint(V, (2, 26), device=DEVICE)
    fused = FusedModel(model)
    caches = [fused.allocate_cache(2, 40) for _ in range(2)]
    starts = torch.tensor([[20], [7]], device=DEVICE)
    fused.has_kernels = False
    for cache in caches:
        fused.fill_cache(text[:, :20], torch.arange(20, device=DEVICE).expand(2, 20), cache)
    new, positions = text[:, 20:26], starts + torch.arange(6, device=DEVICE)
    expected = fused.logits(new, positions, caches[1])
    fused.has_kernels = True
    found = fused.logits(new, positions, caches[0])
    assert torch.allclose(found, expected, atol=1e-4)
    for one, other in zip(caches[0].keys, caches[1].keys, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", tiers.sized(FAMILIES[-2:], FAMILIES))
def test_prefill_with_kernels_equals_prefill_without(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("outpace.models.fused.MAX_QUERY_BYTES", 1024)  # more queries than the kernel takes
    fused = FusedModel(tiny(family).to(DEVICE))
    text, positions = torch.randint(V, (2, 30), device=DEVICE), torch.arange(30, device=DEVICE).expand(2, 30)
    assert not fused._uses_attention_kernel(text)
    caches = [fused.allocate_cache(2, 40) for _ in range(2)]
    found = fused.logits(text, positions, caches[0])
    fused.has_kernels = False
    assert torch.allclose(found, fused.logits(text, positions, caches[1]), atol=1e-4)
    assert torch.allclose(caches[0].keys, caches[1].keys, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_float16_error_is_close_to_that_of_transformers() -> None:
    model = tiny("qwen3").half().to(DEVICE)  # the interpreter's products know no bfloat16
    exact = tiny("qwen3").half().double().to(DEVICE)
    text = torch.randint(V, (1, 20), device=DEVICE)
    expected = transformers_logits_of(exact, text[0])[14:]
    fused = FusedModel(model)
    cache = fused.allocate_cache(1, 32)
    fused.hidden(text[:, :14], torch.arange(14, device=DEVICE)[None], cache)
    found = fused.logits(text[:, 14:], torch.arange(14, 20, device=DEVICE)[None], cache)[0]
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
    cache = fused.allocate_cache(8, 64)
    found = torch.cat(
        [
            fused.logits(texts[:, i : i + 4], torch.arange(i, i + 4, device="cuda").expand(8, 4), cache)
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
from outpace.models.kernels import attention
from outpace.models.kernels import product as products
from outpace.models.kernels.attention import attend
from outpace.models.kernels.product import product

def build(kernel, pointers, missing, warps, stages, max_shared, **constants):
    # names of Triton's generated launcher, which an argument would overwrite
    assert not {"params", "specialization", "options"} & set(kernel.arg_names), kernel.arg_names
    types, fixed, known = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants or name in missing:
            types[name] = "constexpr"
            fixed[(i,)] = constants.get(name)
        else:
            float32 = name in ("eps", "scale", "headroom", "next_headroom")
            types[name] = pointers.get(name) or ("fp32" if float32 else "i32")
            if name in pointers or name in ("N", "K") or name.endswith("stride"):
                known[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=known)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= max_shared, (constants, built.metadata.shared, max_shared)
    print(kernel.__name__)

names = ("x", "weight", "bias", "scaled", "residual", "out", "qkv", "cos", "sin", "q_norm", "k_norm", "keys",
    "values")
wide = {name: "*bf16" for name in names}
more = {"scale": "*bf16", "squares": "*fp32", "sums": "*fp32"}
none = ("bias", "squares", "residual", "scale", "scaled")
kinds = ((0, 4096, none, True), (1, 11008, (), True), (2, 5504, ("bias",), False), (0, 6144, none, True))
for gate, N, missing, overlaps in kinds:
    for BM in map(int, sys.argv[1:]):
        BN, BK, warps, stages, prefetch = products.shape_of(BM, N, torch.bfloat16, gate > 0)
        build(product, wide | more, missing, warps, stages,
            products.shared(BM, BN, BK, stages, torch.bfloat16, gate > 0) + 4096,
            BM=BM, BN=BN, BK=BK, PARTS=64, GATE=gate, SHIFTED=False, PRECISION="tf32",
            PREFETCH=prefetch if overlaps else -1)
others = {"positions": "*i64", "parts": "*fp32", "counters": "*i32"}
for D, ROWS, BLOCK, missing in ((128, 16, 64, ()), (128, 16, 128, ("q_norm", "k_norm")), (256, 32, 64, ())):
    build(attend, wide | others, missing, 4, 3, attention.shared(BLOCK, ROWS, 2 * D, 3), D=D, HALF=D // 2,
        WIDTH=D, ROWS=ROWS, NEW=16, BLOCK=BLOCK, COMBINE_UNROLL=4, SHIFTED=False, PRECISION="tf32",
        OVERLAPS=not missing, PREFETCH=128)
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
    assert done.stdout.split().count("attend") == 3
