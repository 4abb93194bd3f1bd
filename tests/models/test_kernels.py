"""The kernels of a forward pass compute what PyTorch's operations compute.

Without a GPU they run in Triton's interpreter, which has no bfloat16 products. ``pytest -m gpu`` runs
the same tests compiled on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from outpace.models.fused import MAX_HEAD_BYTES, MAX_QUERY_BYTES, Norm

attention = pytest.importorskip(
    "outpace.models.kernels.attention", reason="needs triton", exc_type=ImportError
)
product = pytest.importorskip("outpace.models.kernels.product", reason="needs triton", exc_type=ImportError)
rows = pytest.importorskip("outpace.models.kernels.rows", reason="needs triton", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
EPS = 1e-5


def normed(x: Tensor, weight: Tensor, shifted: bool) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + 1 if shifted else weight)


def stream_of(x: Tensor, norm: Any) -> Any:
    """Return rows as a stream, as the embedding kernel does."""
    return product.embed(torch.arange(len(x), device=DEVICE)[:, None], x, 1.0, norm)


@pytest.mark.parametrize("M", [1, 6, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [None, False, True])
@pytest.mark.parametrize("gate", [product.NO_GATE, product.SILU, product.GELU])
def test_few_rows_product_equals_pytorch(M: int, bias: bool, norm: bool | None, gate: int) -> None:
    K, N = 100, 40  # no multiples of a block
    x, weight = torch.randn(M, K, device=DEVICE), torch.randn(N, K, device=DEVICE) / 10
    bias_vector = torch.randn(N, device=DEVICE) if bias else None
    scale = torch.randn(K, device=DEVICE)
    residual = None if gate else torch.randn(M, N, device=DEVICE)
    inputs = x if norm is None else stream_of(x, product.Scale(scale, EPS, norm))
    found = product.few_rows(inputs, weight, bias_vector, gate=gate, residual=residual)
    expected = (x if norm is None else normed(x, scale, norm)) @ weight.T + (
        0 if bias_vector is None else bias_vector
    )
    if gate:
        half, up = expected.chunk(2, dim=-1)
        expected = (silu(half) if gate == product.SILU else gelu(half, approximate="tanh")) * up
    elif residual is not None:
        expected = expected + residual
    assert torch.allclose(found, expected, atol=1e-4)


def test_large_float16_activations_do_not_overflow() -> None:
    x = torch.full((1, 64), 3000.0, device=DEVICE, dtype=torch.float16)
    scale = torch.full((64,), 30.0, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(32, 64, device=DEVICE).half() / 8
    norm = Norm(scale, EPS, False).scale
    assert norm.headroom == 1 / 32
    found = product.few_rows(stream_of(x, norm), weight)
    expected = normed(x.float(), scale.float(), False) @ weight.float().T
    assert torch.allclose(found.float(), expected, atol=0.2)


@pytest.mark.parametrize(("size", "weight"), [(1.0, 1.0), (0.02, 0.05), (0.002, 0.05), (1000.0, 20.0)])
def test_small_float16_activations_keep_their_precision(size: float, weight: float) -> None:
    """Small activations times small weights must not be scaled down."""
    x = (size * torch.randn(2, 512, device=DEVICE)).half()
    scale = torch.full((512,), weight, device=DEVICE).half()
    matrix = torch.randn(32, 512, device=DEVICE).half() / 16
    found = product.few_rows(stream_of(x, Norm(scale, 1e-12, False).scale), matrix).double()
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-12) * scale.double()
    expected = wide @ matrix.double().T
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_rows_may_be_strided() -> None:
    x, weight = torch.randn(4, 300, device=DEVICE)[:, :100], torch.randn(20, 100, device=DEVICE)
    assert torch.allclose(product.few_rows(x, weight), x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_norm_between_two_products_equals_pytorch(M: int, shifted: bool) -> None:
    x, first, second = (torch.randn(size, device=DEVICE) / 4 for size in ((M, 60), (100, 60), (40, 100)))
    residual, scale = torch.randn(M, 100, device=DEVICE), torch.randn(100, device=DEVICE)
    stream = product.few_rows(x, first, residual=residual, norm=product.Scale(scale, EPS, shifted))
    expected = x @ first.T + residual
    assert torch.allclose(stream.x, expected, atol=1e-4)
    found = product.few_rows(stream, second)
    assert torch.allclose(found, normed(expected, scale, shifted) @ second.T, atol=1e-4)


def test_embedding_kernel_equals_pytorch() -> None:
    table, scale = torch.randn(11, 100, device=DEVICE), torch.randn(100, device=DEVICE)
    ids = torch.tensor([[3, 10, 0], [7, 7, 1]], device=DEVICE)
    for some in (ids, ids[:, 1:]):  # strided rows, too
        stream = product.embed(some, table, 1.5, product.Scale(scale, EPS, False, 0.5))
        expected = (table[some] * 1.5).flatten(0, 1)
        assert torch.equal(stream.x, expected)
        assert torch.allclose(stream.scaled, expected * scale / 2)
        assert torch.allclose(stream.squares.sum(1), expected.square().sum(1))


@pytest.mark.parametrize("shifted", [False, True])
def test_add_norm_kernel_equals_pytorch(shifted: bool) -> None:
    x, more = torch.randn(2, 5, 300, device=DEVICE)
    scale = torch.randn(300, device=DEVICE)
    for added in (None, more):
        total, found = rows.add_norm(x, added, product.Scale(scale, EPS, shifted))
        expected = x if added is None else x + added
        assert torch.allclose(total, expected)
        assert torch.allclose(found, normed(expected, scale, shifted), atol=1e-5)


def test_gate_kernel_equals_pytorch() -> None:
    x = torch.randn(5, 3000, device=DEVICE)
    half, up = x.chunk(2, dim=-1)
    assert torch.allclose(rows.gate(x, product.SILU), silu(half) * up, atol=1e-5)
    assert torch.allclose(rows.gate(x, product.GELU), gelu(half, approximate="tanh") * up, atol=1e-5)


@pytest.mark.parametrize("ranges", ["one range", "many ranges", "stretched ranges"])
@pytest.mark.parametrize(
    ("B", "n", "heads", "kv_heads", "T", "d", "window", "norms"),
    [
        (2, 3, 4, 2, 80, 32, None, False),
        (3, 6, 4, 1, 70, 24, 7, True),
        (1, 1, 2, 2, 200, 16, None, False),
        (2, 2, 8, 2, 130, 32, 20, True),
    ],
)
def test_attention_kernel_equals_pytorch(
    monkeypatch: pytest.MonkeyPatch,
    ranges: str,
    B: int,
    n: int,
    heads: int,
    kv_heads: int,
    T: int,
    d: int,
    window: int | None,
    norms: bool,
) -> None:
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(attention, "MIN_RANGE", 256 if ranges == "one range" else 16)
    if ranges == "stretched ranges":
        monkeypatch.setattr(attention, "BLOCKS", 0)
        monkeypatch.setattr(attention, "MAX_RANGE", 40)
    qkv = torch.randn(B, n, (heads + 2 * kv_heads) * d, device=DEVICE)
    keys, values = torch.randn(2, B, kv_heads, T, d, device=DEVICE)
    start = torch.randint(0, T - n, (B,), device=DEVICE)
    start[0] = 0  # a row without earlier tokens
    positions = start[:, None] + torch.arange(n, device=DEVICE)
    angle = torch.randn(T, d // 2, device=DEVICE)
    cos, sin = (torch.cat((one, one), dim=1) for one in (angle.cos(), angle.sin()))
    weights = torch.randn(2, d, device=DEVICE)

    sizes = [heads, kv_heads, kv_heads]
    q, k, v = (one.transpose(1, 2) for one in torch.split(qkv.view(B, n, -1, d), sizes, dim=2))
    if norms:
        q, k = normed(q, weights[0], False), normed(k, weights[1], False)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[positions][:, None] + torch.cat((-second, first), -1) * sin[positions][:, None]

    at = positions[:, None, :, None].expand(B, kv_heads, n, d)
    all_keys, all_values = keys.scatter(2, at, rotated(k)), values.scatter(2, at, v)
    key = torch.arange(T, device=DEVICE)
    visible = key <= positions[:, None, :, None]
    if window is not None:
        visible &= key > positions[:, None, :, None] - window
    groups = heads // kv_heads
    expected = scaled_dot_product_attention(
        rotated(q), all_keys.repeat_interleave(groups, 1), all_values.repeat_interleave(groups, 1), visible
    )

    counters = torch.zeros(B, kv_heads, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # the first call leaves no state behind
        found = attention.few_queries(
            qkv,
            positions,
            (cos, sin),
            keys,
            values,
            counters,
            heads=heads,
            scale=d**-0.5,
            window=window,
            norms=(*weights, EPS, False) if norms else None,
        )
        assert torch.allclose(found, expected.transpose(1, 2).reshape(B, n, -1), atol=1e-5)
        assert torch.allclose(keys, all_keys, atol=1e-5)
        assert torch.equal(values, all_values)
    assert not counters.any()


KIBIBYTE = 1024
DEVICES = {"H200": 227, "A100": 163, "RTX 4090": 99}  # KiB of shared memory per block


@pytest.mark.parametrize("name", DEVICES)
def test_block_shapes_fit_the_shared_memory_of_every_device(name: str) -> None:
    launch = pytest.importorskip("outpace.models.kernels.launch", reason="needs triton", exc_type=ImportError)
    here = launch.Device(False, 100, DEVICES[name] * KIBIBYTE)
    for dtype in (torch.bfloat16, torch.float32):
        for BM in (8, 16, 32):
            for gate in (False, True):
                for N in (500, 2048, 4096, 6144, 11008, 14336, 32000, 128256):
                    shape = product.fitting(product.shape_of(BM, N, dtype, gate), BM, dtype, gate, here)
                    assert product.shared(BM, *shape[:2], shape[3], dtype, gate) <= here.shared
        for line in (32, 128, 256, MAX_HEAD_BYTES):
            for rows in (16, MAX_QUERY_BYTES // line):
                for block in (attention.BLOCK, 2 * attention.BLOCK):
                    fit, stages = attention.fitting(block, rows, line, here)
                    assert fit >= 16
                    assert attention.shared(fit, rows, line, stages) <= here.shared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M", [1, 6, 17, 32])
@pytest.mark.parametrize(
    ("N", "K", "gate"),
    [(2048, 5504, 0), (4096, 4096, 0), (6144, 2048, 0), (11008, 4096, 1), (32000, 2048, 0)],
)
def test_products_of_real_shapes_are_deterministic_and_correct(
    M: int, N: int, K: int, gate: int, dtype: torch.dtype
) -> None:
    """Run a chain of two products in a CUDA graph. Each may begin before the previous one has ended."""
    torch.manual_seed(M + N)
    x, first = torch.randn(M, K, device="cuda", dtype=dtype), torch.randn(K, K, device="cuda", dtype=dtype)
    second = torch.randn(2 * N if gate else N, K, device="cuda", dtype=dtype) / K**0.5
    norm = Norm(torch.rand(K, device="cuda", dtype=dtype) + 0.5, EPS, False)
    first /= K**0.5

    def run() -> Tensor:
        out: Tensor = product.few_rows(product.few_rows(x, first, norm=norm.scale), second, gate=gate)
        return out

    found = run()
    middle = (x.double() @ first.double().T).to(dtype).double()
    expected = normed(middle, norm.weight.double(), False) @ second.double().T
    if gate:
        half, up = expected.chunk(2, dim=-1)
        expected = silu(half) * up
    assert (found.double() - expected).norm() < 1e-2 * expected.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run() for _ in range(20)]
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, found) for out in outs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 32, 128), (32, 8, 128), (14, 2, 64), (8, 1, 256)])
@pytest.mark.parametrize(
    ("B", "n", "T"), [(1, 1, 512), (1, 6, 512), (32, 4, 512), (1, 6, 4352), (3, 1, 4352), (8, 6, 4352)]
)
def test_attention_of_real_head_shapes_equals_pytorch(
    heads: int, kv_heads: int, d: int, B: int, n: int, T: int, dtype: torch.dtype
) -> None:
    if heads // kv_heads * n * d * dtype.itemsize > MAX_QUERY_BYTES or d * dtype.itemsize > MAX_HEAD_BYTES:
        pytest.skip("larger than the kernel supports")
    torch.manual_seed(T + n)
    qkv = torch.randn(B, n, (heads + 2 * kv_heads) * d, device="cuda", dtype=dtype)
    keys, values = torch.randn(2, B, kv_heads, T, d, device="cuda", dtype=dtype)
    start = torch.randint(T // 2, T - n, (B,), device="cuda")
    positions = start[:, None] + torch.arange(n, device="cuda")
    still = torch.ones(T, d, device="cuda", dtype=dtype), torch.zeros(T, d, device="cuda", dtype=dtype)
    counters = torch.zeros(B, kv_heads, dtype=torch.int32, device="cuda")
    found = attention.few_queries(
        qkv, positions, still, keys, values, counters, heads=heads, scale=d**-0.5
    )  # it has also written the new keys and values
    q = qkv.view(B, n, -1, d)[:, :, :heads].transpose(1, 2).double()
    visible = torch.arange(T, device="cuda") <= positions[:, None, :, None]
    k, v = (one.double().repeat_interleave(heads // kv_heads, 1) for one in (keys, values))
    expected = scaled_dot_product_attention(q, k, v, visible).transpose(1, 2).reshape(B, n, -1)
    assert (found.double() - expected).norm() < 1e-2 * expected.norm()
    assert not counters.any()
