"""The kernels of a pass do what PyTorch's operations do. Here under Triton's interpreter, which knows no
products of bfloat16; on a GPU, `pytest -m gpu` runs the same tests compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

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


def stream_of(x: Tensor, norm: tuple[Tensor, float, bool]) -> object:
    """Rows as an embedding would bring them."""
    return product.take(torch.arange(len(x), device=DEVICE)[:, None], x, 1.0, norm)


@pytest.mark.parametrize("M", [1, 6, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [None, False, True])
@pytest.mark.parametrize("gate", [product.NO_GATE, product.SILU, product.GELU])
def test_few_rows_are_multiplied(M: int, bias: bool, norm: bool | None, gate: int) -> None:
    K, N = 100, 40  # no multiples of a block
    x, weight = torch.randn(M, K, device=DEVICE), torch.randn(N, K, device=DEVICE) / 10
    shift = torch.randn(N, device=DEVICE) if bias else None
    scale = torch.randn(K, device=DEVICE)
    residual = None if gate else torch.randn(M, N, device=DEVICE)
    given = x if norm is None else stream_of(x, (scale, EPS, norm))
    found = product.few_rows(given, weight, shift, gate=gate, residual=residual)
    expected = (x if norm is None else normed(x, scale, norm)) @ weight.T + (0 if shift is None else shift)
    if gate:
        half, up = expected.chunk(2, dim=-1)
        expected = (silu(half) if gate == product.SILU else gelu(half, approximate="tanh")) * up
    elif residual is not None:
        expected = expected + residual
    assert torch.allclose(found, expected, atol=1e-4)


def test_large_activations_have_room() -> None:
    x = torch.full((1, 64), 3000.0, device=DEVICE, dtype=torch.float16)
    scale = torch.full((64,), 30.0, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(32, 64, device=DEVICE).half() / 8
    found = product.few_rows(stream_of(x, (scale, EPS, False)), weight)
    expected = normed(x.float(), scale.float(), False) @ weight.float().T
    assert torch.allclose(found.float(), expected, atol=0.2)


def test_rows_may_lie_apart() -> None:
    x, weight = torch.randn(4, 300, device=DEVICE)[:, :100], torch.randn(20, 100, device=DEVICE)
    assert torch.allclose(product.few_rows(x, weight), x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_norm_stands_between_two_products(M: int, shifted: bool) -> None:
    x, first, second = (torch.randn(size, device=DEVICE) / 4 for size in ((M, 60), (100, 60), (40, 100)))
    residual, scale = torch.randn(M, 100, device=DEVICE), torch.randn(100, device=DEVICE)
    stream = product.few_rows(x, first, residual=residual, norm=(scale, EPS, shifted))
    expected = x @ first.T + residual
    assert torch.allclose(stream.x, expected, atol=1e-4)
    found = product.few_rows(stream, second)
    assert torch.allclose(found, normed(expected, scale, shifted) @ second.T, atol=1e-4)


def test_tokens_are_embedded() -> None:
    table, scale = torch.randn(11, 100, device=DEVICE), torch.randn(100, device=DEVICE)
    ids = torch.tensor([[3, 10, 0], [7, 7, 1]], device=DEVICE)
    for some in (ids, ids[:, 1:]):  # rows that lie apart, too
        stream = product.take(some, table, 1.5, (scale, EPS, False))
        assert torch.equal(stream.x, (table[some] * 1.5).flatten(0, 1))


@pytest.mark.parametrize("shifted", [False, True])
def test_rows_are_summed_and_normalized(shifted: bool) -> None:
    x, more = torch.randn(2, 5, 300, device=DEVICE)
    scale = torch.randn(300, device=DEVICE)
    for added in (None, more):
        total, found = rows.normed(x, added, (scale, EPS, shifted))
        expected = x if added is None else x + added
        assert torch.allclose(total, expected)
        assert torch.allclose(found, normed(expected, scale, shifted), atol=1e-5)


def test_gates_of_many_rows() -> None:
    x = torch.randn(5, 3000, device=DEVICE)
    half, up = x.chunk(2, dim=-1)
    assert torch.allclose(rows.gate(x, product.SILU), silu(half) * up, atol=1e-5)
    assert torch.allclose(rows.gate(x, product.GELU), gelu(half, approximate="tanh") * up, atol=1e-5)


@pytest.mark.parametrize("ranges", ["one range", "many ranges"])
@pytest.mark.parametrize(
    ("B", "n", "heads", "kv_heads", "T", "d", "window", "norms"),
    [
        (2, 3, 4, 2, 80, 32, None, False),
        (3, 6, 4, 1, 70, 24, 7, True),
        (1, 1, 2, 2, 200, 16, None, False),
        (2, 2, 8, 2, 130, 32, 20, True),
    ],
)
def test_few_queries_attend(
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
    monkeypatch.setattr(attention, "RANGE", 16 if ranges == "many ranges" else 256)
    qkv = torch.randn(B, n, (heads + 2 * kv_heads) * d, device=DEVICE)
    keys, values = torch.randn(2, B, kv_heads, T, d, device=DEVICE)
    start = torch.randint(0, T - n, (B,), device=DEVICE)
    start[0] = 0  # a row without earlier tokens
    places = start[:, None] + torch.arange(n, device=DEVICE)
    angle = torch.randn(T, d // 2, device=DEVICE)
    cos, sin = (torch.cat((one, one), dim=1) for one in (angle.cos(), angle.sin()))
    weights = torch.randn(2, d, device=DEVICE)

    sizes = [heads, kv_heads, kv_heads]
    q, k, v = (one.transpose(1, 2) for one in torch.split(qkv.view(B, n, -1, d), sizes, dim=2))
    if norms:
        q, k = normed(q, weights[0], False), normed(k, weights[1], False)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[places][:, None] + torch.cat((-second, first), -1) * sin[places][:, None]

    at = places[:, None, :, None].expand(B, kv_heads, n, d)
    all_keys, all_values = keys.scatter(2, at, rotated(k)), values.scatter(2, at, v)
    key = torch.arange(T, device=DEVICE)
    seen = key <= places[:, None, :, None]
    if window is not None:
        seen &= key > places[:, None, :, None] - window
    shared = heads // kv_heads
    expected = scaled_dot_product_attention(
        rotated(q), all_keys.repeat_interleave(shared, 1), all_values.repeat_interleave(shared, 1), seen
    )

    room = attention.Room(torch.device(DEVICE))
    for _ in range(2):  # nothing is left of the first call
        found = attention.few_queries(
            qkv,
            places,
            (cos, sin),
            keys,
            values,
            room,
            heads=heads,
            scale=d**-0.5,
            window=window,
            norms=(*weights, EPS, False) if norms else None,
        )
        assert torch.allclose(found, expected.transpose(1, 2).reshape(B, n, -1), atol=1e-5)
        assert torch.allclose(keys, all_keys, atol=1e-5)
        assert torch.equal(values, all_values)
    assert not room.counters.any()
