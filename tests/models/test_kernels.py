"""The kernels of a forward pass compute what PyTorch's operations compute.

Without a GPU they run in Triton's interpreter, which has no bfloat16 products. ``pytest -m gpu`` runs
the same tests compiled on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from transformers.activations import ACT2FN

from outpace.models.fused import Norm
from outpace.models.rearranged import ACTIVATIONS, MAX_HEAD_BYTES, MAX_QUERY_BYTES, kind_of
from tests import tiers

attention = pytest.importorskip(
    "outpace.models.kernels.attention", reason="needs triton", exc_type=ImportError
)
ranging = pytest.importorskip("outpace.models.kernels.ranges", reason="needs triton", exc_type=ImportError)
prefill = pytest.importorskip("outpace.models.kernels.prefill", reason="needs triton", exc_type=ImportError)
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
@pytest.mark.parametrize("gate", [product.NONE, product.SILU, product.GELU_TANH])
def test_few_rows_product_equals_pytorch(M: int, bias: bool, norm: bool | None, gate: int) -> None:
    K, N = 100, 40  # no multiples of a block
    x, weight = torch.randn(M, K, device=DEVICE), torch.randn(N, K, device=DEVICE) / 10
    bias_vector = torch.randn(N, device=DEVICE) if bias else None
    scale = torch.randn(K, device=DEVICE)
    residual = None if gate else torch.randn(M, N, device=DEVICE)
    inputs = x if norm is None else stream_of(x, product.Scale(scale, EPS, norm))
    found = product.few_rows(inputs, weight, bias_vector, activation=gate, gate=gate > 0, residual=residual)
    expected = (x if norm is None else normed(x, scale, norm)) @ weight.T + (
        0 if bias_vector is None else bias_vector
    )
    if gate:
        half, up = expected.chunk(2, dim=-1)
        expected = (silu(half) if gate == product.SILU else gelu(half, approximate="tanh")) * up
    elif residual is not None:
        expected = expected + residual
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("M", [1, 17])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_few_rows_product_has_every_activation(M: int, name: str) -> None:
    x, weight, bias = (torch.randn(size, device=DEVICE) for size in ((M, 60), (40, 60), (40,)))
    number = ACTIVATIONS[name]
    residual = torch.randn(M, 40, device=DEVICE)
    found = product.few_rows(x, weight, bias, activation=number, residual=residual)
    assert torch.allclose(found, ACT2FN[name](x @ weight.T + bias) + residual, atol=1e-4)
    assert kind_of(ACT2FN[name]) == number


@pytest.mark.parametrize("K", [32, 100])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_norm_kernel_equals_pytorch(K: int, centered: bool, bias: bool) -> None:
    x, scale = torch.randn(5, 2 * K, device=DEVICE)[:, :K] + 3, torch.randn(K, device=DEVICE)
    shift = torch.randn(K, device=DEVICE) if bias else None
    found = rows.normalize(x, scale, shift, EPS, centered)
    if centered:
        expected = torch.nn.functional.layer_norm(x, (K,), scale, shift, EPS)
    else:
        expected = normed(x, scale, False) + (0 if shift is None else shift)
    assert torch.allclose(found, expected, atol=1e-5)


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


@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_layer_norm_between_two_products_equals_pytorch(M: int, dtype: torch.dtype) -> None:
    given = [torch.randn(size, device=DEVICE) / 4 for size in ((M, 60), (100, 60), (40, 100))]
    given += [torch.randn(M, 100, device=DEVICE) + 2, torch.randn(40, device=DEVICE)]
    given += torch.randn(2, 100, device=DEVICE)
    x, first, second, residual, bias, scale, shift = (one.to(dtype) for one in given)
    norm = product.Scale(scale, EPS, False, 0.25, centered=True)
    stream = product.few_rows(x, first, residual=residual, norm=norm)
    centers = second.float() @ scale.float()
    found = product.few_rows(stream, second, bias.float() + second.float() @ shift.float(), centers=centers)
    before = (x.float() @ first.float().T + residual.float()).to(dtype).float()
    expected = torch.nn.functional.layer_norm(before, (100,), scale.float(), shift.float(), EPS)
    expected = expected @ second.float().T + bias.float()
    assert torch.allclose(found.float(), expected, atol=1e-4 if dtype == torch.float32 else 5e-2)


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
    total, found = rows.add_norm(x, more, product.Scale(scale, EPS, shifted))
    assert torch.allclose(total, x + more)
    assert torch.allclose(found, normed(x + more, scale, shifted), atol=1e-5)


def test_gate_kernel_equals_pytorch() -> None:
    x = torch.randn(5, 3000, device=DEVICE)
    half, up = x.chunk(2, dim=-1)
    assert torch.allclose(rows.gate(x, product.SILU), silu(half) * up, atol=1e-5)
    assert torch.allclose(rows.gate(x, product.GELU_TANH), gelu(half, approximate="tanh") * up, atol=1e-5)


LAYERS, LAYER = 2, 1  # of the cache's pages; one layer is used
T = 160  # tokens that a row has pages for


@dataclass
class Heads:
    """An attention layer with random weights."""

    heads: int
    kv_heads: int
    d: int
    window: int | None = None
    norms: bool | None = None  # whether weights are relative to 1; None: no norms
    dtype: torch.dtype = torch.float32
    page: int = 32
    tokens: int = T
    rotates: bool = True
    distances: int = 0  # rows of the table of biases; 0: no bias

    def __post_init__(self) -> None:
        angle = torch.randn(self.tokens, self.d // 2, device=DEVICE)
        angle = angle if self.rotates else torch.zeros_like(angle)
        self.angles = [torch.cat((one, one), dim=1).to(self.dtype) for one in (angle.cos(), angle.sin())]
        self.bias = torch.randn(self.distances, self.heads, device=DEVICE) if self.distances else None
        self.weights = torch.randn(2, self.d, device=DEVICE).to(self.dtype)

    def qkv(self, B: int, n: int) -> Tensor:
        return torch.randn(B, n, (self.heads + 2 * self.kv_heads) * self.d, device=DEVICE).to(self.dtype)

    def pages(self, count: int) -> list[Tensor]:
        shape = LAYERS, 2, self.kv_heads, self.page, self.d
        return [torch.randn(shape, device=DEVICE).to(self.dtype) for _ in range(count)]

    def few(self, qkv: Tensor, positions: Tensor, pages: list[list[Tensor]]) -> Tensor:
        counters = torch.zeros(len(qkv), self.kv_heads, dtype=torch.int32, device=DEVICE)
        table = table_of(pages)
        sizes = *positions.shape, self.heads, self.kv_heads, self.d
        blocks = ranging.blocks_of(*sizes, page=self.page, dtype=self.dtype, at=positions.device)
        ranges = ranging.ranges_of(positions, table, blocks, self.window)
        found: list[Tensor] = [  # the first call leaves no state behind
            attention.few_queries(
                qkv,
                positions,
                self.angles if self.rotates else None,
                table,
                ranges,
                blocks,
                counters,
                bias=None if self.bias is None else self.bias / math.log(2),
                **self.options,
            )
            for _ in range(2)
        ]
        assert torch.equal(*found)
        assert not counters.any()
        return found[0]

    def many(self, qkv: Tensor, positions: Tensor, pages: list[list[Tensor]]) -> Tensor:
        out: Tensor = prefill.many_queries(
            qkv, positions, self.angles, table_of(pages), page=self.page, **self.options
        )
        return out

    @property
    def options(self) -> dict[str, Any]:
        return {
            "layer": LAYER,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "scale": self.d**-0.5,
            "window": self.window,
            "norms": None if self.norms is None else (*self.weights, EPS, self.norms),
        }

    def expected(
        self, qkv: Tensor, positions: Tensor, pages: list[list[Tensor]]
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the attention output and the pages afterwards, in float64."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        outs, after = [], []
        for row, position, own in zip(qkv.double(), positions, pages, strict=True):
            n, at = len(position), position[position >= 0]
            q, k, v = (one[: len(at)] for one in torch.split(row.view(n, -1, self.d), sizes, dim=1))
            if self.norms is not None:
                q, k = (
                    normed(one, weight, self.norms)
                    for one, weight in zip((q, k), self.weights.double(), strict=True)
                )
            cos, sin = (one[at].double()[:, None] for one in self.angles)

            def rotated(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
                first, second = x.chunk(2, dim=-1)
                return x * cos + torch.cat((-second, first), -1) * sin

            own, k = [page.double() for page in own], rotated(k)
            for i, t in enumerate(at.tolist()):
                own[t // self.page][LAYER, 0, :, t % self.page] = k[i]
                own[t // self.page][LAYER, 1, :, t % self.page] = v[i]
            after.append(own)
            out = torch.zeros(n, self.heads * self.d, dtype=torch.float64, device=DEVICE)
            if len(at):
                length = int(at[-1]) + 1
                keys, values = (
                    one.repeat_interleave(self.heads // self.kv_heads, 0)[:, :length]
                    for one in torch.cat([page[LAYER] for page in own], dim=2)
                )
                key = torch.arange(length, device=DEVICE)
                visible = key <= at[:, None]
                if self.window is not None:
                    visible &= key > at[:, None] - self.window
                # What no query sees may be anything.
                values = values.where(visible.any(0)[:, None], 0)
                mask = torch.zeros(self.heads, *visible.shape, dtype=torch.float64, device=DEVICE)
                if self.bias is not None:
                    distance = (at[:, None] - key).clamp(0, self.distances - 1)
                    mask += self.bias[distance].permute(2, 0, 1)
                mask = mask.masked_fill(~visible, -torch.inf)
                each = scaled_dot_product_attention(rotated(q).transpose(0, 1), keys, values, mask)
                out[: len(at)] = each.transpose(0, 1).flatten(1)
            outs.append(out)
        return torch.stack(outs), after

    def check(self, qkv: Tensor, positions: Tensor, pages: list[list[Tensor]], few: bool) -> None:
        """Check outputs and all pages against float64."""
        expected, after = self.expected(qkv, positions, pages)
        found = (self.few if few else self.many)(qkv, positions, pages)
        atol = 1e-5 if self.dtype == torch.float32 else 2e-2
        assert torch.allclose(found.double(), expected, atol=atol)
        for row, row_after in zip(pages, after, strict=True):
            for page, page_after in zip(row, row_after, strict=True):
                assert torch.allclose(
                    page.double(), page_after, atol=atol, rtol=1e-2 if atol > 1e-3 else 1e-5
                )


def table_of(pages: list[list[Tensor]]) -> Tensor:
    return torch.tensor([[page.data_ptr() for page in row] for row in pages], device=DEVICE)


def positions_of(*rows: tuple[int, int], n: int) -> Tensor:
    """Return positions of rows, each a start and a number of tokens before padding."""
    i = torch.arange(n, device=DEVICE)
    return torch.stack([torch.where(i < count, start + i, -1) for start, count in rows])


LAYERS_OF_FEW: list[tuple[int, Callable[[], Heads]]] = [
    (3, lambda: Heads(4, 2, 32)),
    (6, lambda: Heads(4, 1, 24, window=7, norms=False)),
    (1, lambda: Heads(2, 2, 16, page=16)),
    (2, lambda: Heads(8, 2, 32, window=40, norms=True)),
    (4, lambda: Heads(2, 1, 64, dtype=torch.float16, page=128)),
    (5, lambda: Heads(3, 3, 16, rotates=False, distances=9)),
]


@pytest.mark.parametrize(
    ("ranges", "n", "layer"),
    [
        (ranges, *case)
        for ranges, case in tiers.each_value(
            ["many ranges", "stretched ranges", "one range", "many blocks"], LAYERS_OF_FEW
        )
    ],
)
def test_few_queries_equal_pytorch(
    monkeypatch: pytest.MonkeyPatch, ranges: str, n: int, layer: Callable[[], Heads]
) -> None:
    monkeypatch.setattr(ranging, "BLOCK", 16)
    monkeypatch.setattr(ranging, "MIN_RANGE", (256, 256) if ranges == "one range" else (16, 16))
    here = layer()
    if ranges == "many blocks":
        monkeypatch.setattr(ranging, "FEW_BLOCKS", 0)
    if ranges == "stretched ranges":
        set_processors(monkeypatch, 2 * here.kv_heads)
    # A row without earlier tokens, a row of padding, and new tokens on both sides of a page's end
    positions = positions_of((0, n), (5, 0), (128 - n // 2, n), n=n)
    here.check(here.qkv(3, n), positions, [here.pages(-(-T // here.page)) for _ in range(3)], few=True)


@pytest.mark.parametrize("few_blocks", [0, 160])
@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (5, torch.float32), (3, torch.float16)])
def test_cross_attention_equals_pytorch(
    monkeypatch: pytest.MonkeyPatch, n: int, dtype: torch.dtype, few_blocks: int
) -> None:
    """Every query sees all tokens of its row's source, also those that are later than the query."""
    monkeypatch.setattr(ranging, "BLOCK", 16)
    monkeypatch.setattr(ranging, "MIN_RANGE", (16, 16))
    monkeypatch.setattr(ranging, "FEW_BLOCKS", few_blocks)
    here, lengths = Heads(2, 2, 16, dtype=dtype, page=32), [1, 70, 128]
    states = torch.randn(3, 128, 2 * 2 * 16, device=DEVICE).to(dtype)
    pages, positions = [here.pages(4) for _ in lengths], positions_of((0, n), (9, n), (3, n), n=n)
    at = positions_of(*((0, length) for length in lengths), n=128)
    prefill.write(states, at, table_of(pages), layer=LAYER, page=32, heads=2)
    before = [page.clone() for row in pages for page in row]
    queries, counters = torch.randn(3, n, 32, device=DEVICE).to(dtype), torch.zeros(6, device=DEVICE).int()
    blocks = ranging.blocks_of(3, n, 2, 2, 16, page=32, dtype=dtype, at=at.device)
    ranges = ranging.source_ranges_of(torch.tensor(lengths, device=DEVICE), table_of(pages), blocks)
    found = attention.few_queries(
        queries, positions, None, table_of(pages), ranges, blocks, counters,
        layer=LAYER, heads=2, kv_heads=2, scale=0.25, cross=True,
    )  # fmt: skip
    assert all(map(torch.equal, before, [page for row in pages for page in row]))
    for i, length in enumerate(lengths):
        q, k, v = (
            one.double().view(-1, 2, 16).transpose(0, 1)
            for one in (queries[i], *states[i, :length].chunk(2, dim=-1))
        )
        expected = scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        assert torch.allclose(found[i].double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("n", "layer"),
    [
        (1, lambda: Heads(2, 2, 16, page=16)),
        (9, lambda: Heads(4, 2, 32, norms=True)),
        (40, lambda: Heads(4, 2, 24, window=21, norms=False)),
        (50, lambda: Heads(2, 1, 32)),
        (70, lambda: Heads(2, 2, 64, dtype=torch.float16, page=128)),
        (20, lambda: Heads(2, 1, 80, window=100)),
    ],
)
@pytest.mark.parametrize("size", [16, 64])
def test_many_queries_equal_pytorch(
    monkeypatch: pytest.MonkeyPatch, size: int, n: int, layer: Callable[[], Heads]
) -> None:
    monkeypatch.setattr(prefill, "QUERIES", size)
    monkeypatch.setattr(prefill, "BLOCK", size)
    here = layer()
    positions = positions_of((0, n), (60, n), (5, 0), (T - n, n // 2), n=n)
    here.check(here.qkv(4, n), positions, [here.pages(-(-T // here.page)) for _ in range(4)], few=False)


def test_prefill_in_two_chunks_equals_prefill_in_one() -> None:
    here = Heads(4, 2, 32, norms=False)
    qkv, pages = here.qkv(2, 90), [here.pages(5) for _ in range(2)]
    positions = positions_of((0, 90), (30, 90), n=90)
    one = here.many(qkv, positions, pages)
    before = [[page.clone() for page in row] for row in pages]
    for row in pages:
        for page in row[2:]:
            page[LAYER] = float("nan")  # the chunks write these again
    pages[0][1][LAYER], pages[1][1][LAYER] = float("nan"), before[1][1][LAYER]
    parts = slice(0, 41), slice(41, 90)
    chunks = [here.many(qkv[:, part].contiguous(), positions[:, part], pages) for part in parts]
    assert torch.allclose(torch.cat(chunks, dim=1), one, atol=1e-5)
    last = positions[:, -1].tolist()
    for row, row_before, end in zip(pages, before, last, strict=True):
        found, expected = (
            torch.cat([page[LAYER] for page in one], 2)[:, :, : end + 1] for one in (row, row_before)
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("few", [True, False])
def test_rows_that_share_a_page_read_the_same_keys(few: bool) -> None:
    here = Heads(4, 2, 32)
    shared, own = here.pages(2), [here.pages(1) for _ in range(2)]
    qkv = here.qkv(1, 5).expand(2, -1, -1).contiguous()
    attend = here.few if few else here.many
    positions = positions_of((64, 5), (64, 5), n=5)
    one, other = attend(qkv, positions, [[*shared, *page] for page in own])
    assert torch.equal(one, other)
    copies = [[*(page.clone() for page in shared), *page] for page in own]
    assert torch.equal(attend(qkv, positions, copies), torch.stack((one, other)))


@pytest.mark.parametrize("few", [True, False])
def test_a_page_is_written_through_its_own_row_only(few: bool) -> None:
    here = Heads(4, 2, 32)
    shared, own, unused = here.pages(1), [here.pages(2) for _ in range(3)], here.pages(2)
    before = [page.clone() for page in (*shared, *unused)]
    others = [page.clone() for row in own for page in row]
    rows = [[*shared, *row] for row in own]
    here.check(here.qkv(3, 6), positions_of((32, 6), (61, 6), (50, 0), n=6), rows, few)
    assert all(map(torch.equal, (*shared, *unused), before))
    changed = [not torch.equal(*pair) for pair in zip((p for row in own for p in row), others, strict=True)]
    assert changed == [True, False, True, True, False, False]


@pytest.mark.parametrize(
    ("few", "entry", "window"),
    tiers.each_value([True, False], ["NaN", "0"], [None, 20]),
)
def test_pages_that_a_row_does_not_need_are_never_read(
    monkeypatch: pytest.MonkeyPatch, few: bool, entry: str, window: int | None
) -> None:
    """Neither those after its tokens, nor those before its window, nor what is after the last token."""
    monkeypatch.setattr(ranging, "BLOCK", 16)
    monkeypatch.setattr(ranging, "MIN_RANGE", (16, 16))
    here = Heads(4, 2, 32, window=window)
    qkv, n = here.qkv(3, 6), 6
    starts = [70, 0, 26]
    positions = positions_of((70, n), (0, n), (26, n), n=n)
    pages = [here.pages(5) for _ in starts]
    nowhere = torch.full_like(pages[0][0], float("nan"))
    for row, start in zip(pages, starts, strict=True):
        row[start // here.page][LAYER, :, :, start % here.page :] = float("nan")
    expected, _ = here.expected(qkv, positions, pages)
    for row, start in zip(pages, starts, strict=True):
        needed = range(0 if window is None else max(0, start + 1 - window) // here.page, 5)
        for i in range(5):
            if i not in needed or i * here.page >= start + n:
                row[i] = nowhere
    table = table_of(pages)
    if entry == "0":
        table[table == nowhere.data_ptr()] = 0
    monkeypatch.setattr(f"{__name__}.table_of", lambda pages: table)
    found = (here.few if few else here.many)(qkv, positions, pages)
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize(("per_head", "window", "B"), tiers.each_value([40, 3, 1], [None, 50], [6, 33]))
def test_rows_of_any_lengths_share_the_processors(
    monkeypatch: pytest.MonkeyPatch, B: int, window: int | None, per_head: int
) -> None:
    """A row may have a range that is not full: there must be blocks for all of them."""
    monkeypatch.setattr(ranging, "BLOCK", 16)
    monkeypatch.setattr(ranging, "MIN_RANGE", (16, 16))
    here = Heads(2, 1, 16, window=window)
    set_processors(monkeypatch, per_head * here.kv_heads)
    starts = [1, 17, 0, 158, 33, 65] if B == 6 else [1, *[0] * 31, 158]
    positions = positions_of(*((start, start != 33) for start in starts), n=1)
    here.check(here.qkv(B, 1), positions, [here.pages(-(-T // here.page)) for _ in range(B)], few=True)


def set_processors(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    """Let the kernel cut rows as on a GPU with this many processors."""
    here = replace(ranging.device(torch.device(DEVICE)), processors=processors)
    monkeypatch.setattr(ranging, "device", lambda _: here)


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
        for line in (32, 128, 256, MAX_HEAD_BYTES, 2 * MAX_HEAD_BYTES):
            for rows in (16, MAX_QUERY_BYTES // line, prefill.QUERY_BYTES // line):
                for block in (ranging.BLOCK, 2 * ranging.BLOCK):
                    fit, stages = ranging.fitting(block, rows, line, here)
                    assert fit >= 16
                    assert ranging.shared(fit, rows, line, stages) <= here.shared


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
        out: Tensor = product.few_rows(
            product.few_rows(x, first, norm=norm.scale), second, activation=gate, gate=gate > 0
        )
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
    ("B", "n", "tokens"),
    [(1, 1, 512), (1, 6, 512), (32, 4, 512), (1, 6, 4352), (3, 1, 4352), (8, 6, 4352), (2, 300, 1024)],
)
def test_attention_of_real_head_shapes_equals_pytorch(
    heads: int, kv_heads: int, d: int, B: int, n: int, tokens: int, dtype: torch.dtype
) -> None:
    head = d * dtype.itemsize
    few = heads // kv_heads * n * head <= MAX_QUERY_BYTES and head <= MAX_HEAD_BYTES
    torch.manual_seed(tokens + n)
    here = Heads(heads, kv_heads, d, dtype=dtype, page=128, tokens=tokens)
    pages = [here.pages(tokens // here.page) for _ in range(B)]
    starts = torch.randint(tokens // 2, tokens - n, (B,)).tolist()
    qkv, positions = here.qkv(B, n), positions_of(*[(start, n) for start in starts], n=n)
    expected, after = here.expected(qkv, positions, pages)
    for attend in (here.few, here.many) if few else (here.many,):
        found = attend(qkv, positions, pages)
        assert (found.double() - expected).norm() < 1e-2 * expected.norm()
    for row, row_after in zip(pages, after, strict=True):
        for page, page_after in zip(row, row_after, strict=True):
            assert (page.double() - page_after).norm() < 1e-2 * page_after.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 32, 128), (16, 16, 128), (32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("start", [3, 121, 250, 700, 1930])  # where the length of a range does not change
def test_an_output_has_the_same_bits_however_many_tokens_are_new(
    heads: int, kv_heads: int, d: int, start: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(start)
    here, n = Heads(heads, kv_heads, d, dtype=dtype, page=128, tokens=2176), 8
    pages = [here.pages(17)]
    qkv, positions = here.qkv(1, n), positions_of((start, n), n=n)
    every = here.few(qkv, positions, pages)
    for some in (1, 2, 3):
        parts = [slice(i, i + some) for i in range(0, n, some)]
        found = [here.few(qkv[:, part].contiguous(), positions[:, part], pages) for part in parts]
        assert torch.equal(torch.cat(found, dim=1), every)
