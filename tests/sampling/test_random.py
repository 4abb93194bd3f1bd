"""The noise is a pure function of its key, has the same bits everywhere, and passes tests of randomness."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outpace.sampling import random
from outpace.sampling.random import Stream
from tests import tiers
from tests.statistical import chisquare

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st

WORD = st.integers(0, 2**32 - 1)
ZERO = torch.tensor(0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert random.philox(*counter, *key) == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(WORD, WORD, WORD, st.integers(-(2**63), 2**63 - 1), st.sampled_from(Stream))
def test_integers_arrays_and_tensors_give_the_same_words(
    block: int, position: int, start: int, seed: int, stream: Stream
) -> None:
    parts = (block, position, start, int(stream), seed & random.WORD, (seed >> 32) & random.WORD)
    as_integers = random.philox(*parts)
    as_arrays = random.philox(*(np.array([part], dtype=np.int64) for part in parts))
    as_tensors = random.philox(*(torch.tensor([part]) for part in parts))
    assert [int(word[0]) for word in as_arrays] == list(as_integers)
    assert [int(word[0]) for word in as_tensors] == list(as_integers)


def test_words_are_philox_of_the_documented_key() -> None:
    seed, position, start = -(2**62) + 12345, 77, 70
    parts = torch.tensor(seed), torch.tensor(position), torch.tensor(start)
    for level, node in ((0, 0), (3, 0), (0, 7), (255, 65535)):
        words = random.words(random.key(*parts, Stream.RESIDUAL, level, node), blocks=3)
        for block in range(3):
            key = (seed & random.WORD, (seed >> 32) & random.WORD)
            c3 = Stream.RESIDUAL // 2 + 256 * level + 65536 * node
            assert tuple(words[block].tolist()) == random.philox(block, position, start, c3, *key)


def test_words_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.arange(11)[:, None] * 999, torch.arange(5), torch.tensor(3)
    key = random.key(*parts, Stream.DRAFT, level=1, node=torch.arange(5))
    whole = random.words(key, blocks=37)
    for cached in (1, 7, 64):
        monkeypatch.setattr(random, "CACHED", cached)
        assert torch.equal(random.words(key, blocks=37), whole)


def test_other_devices_get_the_same_words() -> None:
    """The code for other devices runs on CPU tensors, because `meta` tensors cannot be computed with."""
    seed, position, start = torch.arange(4)[:, None] - 2, torch.arange(6), torch.tensor(2)
    for node in (0, torch.arange(6)):
        key = random.key(seed, position, start, Stream.ACCEPT, 1, node)
        assert torch.equal(random._words_elsewhere(key, 5), random.words(key, blocks=5))


def test_triton_computes_the_same_words() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'outpace[gpu]'")
    tl = pytest.importorskip("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(out, seed, position, start, stream, SIZE: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
        block = tl.arange(0, SIZE).to(tl.uint32)
        zero = block * 0
        lanes = tl.philox(seed, block, zero + position, zero + start, zero + stream)
        tl.store(out + block * 4 + 0, lanes[0].to(tl.int64))
        tl.store(out + block * 4 + 1, lanes[1].to(tl.int64))
        tl.store(out + block * 4 + 2, lanes[2].to(tl.int64))
        tl.store(out + block * 4 + 3, lanes[3].to(tl.int64))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed, position, start = 0x1234_5678_9ABC_DEF0, 4000, 3997
    out = torch.zeros(16, 4, dtype=torch.int64, device=device)
    kernel[(1,)](out, seed, position, start, Stream.ACCEPT // 2, 16)
    parts = torch.tensor(seed), torch.tensor(position), torch.tensor(start)
    expected = random.words(random.key(*parts, Stream.ACCEPT), blocks=16)
    assert torch.equal(out.cpu(), expected.to(torch.int64))


def test_a_few_keys_and_many_keys_have_the_same_numbers_at_every_level_and_node() -> None:
    """Few keys are computed with Python's integers, many with arrays."""
    seed, start, nodes = torch.arange(40) - 3, torch.arange(40) * 5, torch.arange(40) % 4
    for level in (0, 2):
        many = random.uniform(seed, start + 1, start, Stream.ACCEPT, level, nodes)
        few = [
            random.uniform(seed[i], start[i] + 1, start[i], Stream.ACCEPT, level, int(nodes[i]))
            for i in range(40)
        ]
        assert torch.equal(many, torch.stack(few))
        for rows in (2, 40):
            lists = random.halves(seed[:rows].tolist(), start[:rows].tolist(), 3, Stream.ACCEPT, level)
            at = (seed[:rows, None], start[:rows, None] + torch.arange(3), start[:rows, None])
            both = torch.stack(random.accept_and_residual(*at, level), dim=-1)
            assert torch.equal(torch.tensor(lists, dtype=torch.float64), both)


def test_levels_and_nodes_share_no_number() -> None:
    seed, position, start = torch.tensor(5), torch.arange(9, 12), torch.tensor(9)
    seen = [
        random.uniform(seed, position, start, stream, level, node)
        for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL)
        for level in (0, 1, 2)
        for node in (0, 1, 2)
    ]
    assert len(set(torch.cat(seen).tolist())) == 3 * 27


def test_the_target_stream_has_neither_level_nor_node() -> None:
    seed, position = torch.arange(4), torch.arange(4) + 7
    at = torch.arange(4)
    plain = random.gumbel(seed, position, 50)
    assert torch.equal(random.gumbel(seed, position, 50, Stream.TARGET, at, level=3, node=at), plain)


@pytest.mark.parametrize(("level", "node"), [(-1, 0), (256, 0), (0, -1), (0, 65536)])
def test_a_level_or_node_out_of_range_is_refused(level: int, node: int) -> None:
    one = torch.tensor(1)
    with pytest.raises(ValueError, match=f"{'node' if level == 0 else 'level'}: got"):
        random.uniform(one, one, one, Stream.DRAFT, level, node)


def test_extreme_words_stay_inside_the_open_interval() -> None:
    ends = random.unit32(torch.tensor([0, 2**32 - 1]))
    assert ends.tolist() == [2.0**-33, 1 - 2.0**-24]
    exponentials = -torch.log1p(-ends)
    assert (exponentials > 0).all()
    assert exponentials.isfinite().all()
    assert exponentials.log().isfinite().all()


def test_uniforms_use_52_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, expected in ((0, 2.0**-53), (2**32 - 1, 1 - 2.0**-53)):
        fixed = np.full((1, 1, 4), word, dtype=np.uint32)
        monkeypatch.setattr(random, "_words_cpu", lambda *_, fixed=fixed: fixed)
        monkeypatch.setattr(random, "_words_handful", lambda *_, word=word: [(word,) * 4])
        for handful in (0, 16):
            monkeypatch.setattr(random, "HANDFUL", handful)
            u = random.uniform(ZERO, ZERO, ZERO, Stream.ACCEPT)
            assert u.dtype is torch.float64
            assert u.item() == expected


@pytest.mark.parametrize("handful", [0, 16])
def test_halves_are_the_uniforms_of_both_streams(handful: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "HANDFUL", handful)
    seeds, starts = [7, -(2**63), 2**63 - 1], [0, 5, 2**31 - 9]
    uniforms = torch.tensor(random.halves(seeds, starts, 4, Stream.ACCEPT), dtype=torch.float64)
    seed, start = torch.tensor(seeds)[:, None], torch.tensor(starts)[:, None]
    for i, stream in enumerate((Stream.ACCEPT, Stream.RESIDUAL)):
        assert torch.equal(uniforms[..., i], random.uniform(seed, start + torch.arange(4), start, stream))


@pytest.mark.parametrize("V", [31, 4096, 5000])
@pytest.mark.parametrize("shift", [0.0, 20.0, 1e4, -1e4])
def test_sample_softmax_inverts_the_cdf_of_the_softmax(V: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(40, V, generator=generator) * 3 + shift
    logits[:, ::3] = -torch.inf
    u = torch.rand(40, generator=generator, dtype=torch.float64)
    tokens, has_softmax = random.sample_softmax(logits, u.tolist())
    assert all(has_softmax)
    assert (tokens % 3 != 0).all()
    cdf = logits.double().softmax(-1).cumsum(-1)
    for token, row, one in zip(tokens.tolist(), cdf, u.tolist(), strict=True):
        assert row[token - 1] - 1e-5 <= one <= row[token] + 1e-5


def test_a_row_samples_the_same_token_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = 4 * torch.randn(64, 4096, generator=generator)
    u = torch.rand(64, generator=generator, dtype=torch.float64).tolist()
    logits[5] += 200.0  # leaves float32's range
    together, _ = random.sample_softmax(logits, u)
    alone = [random.sample_softmax(row[None], [one])[0] for row, one in zip(logits, u, strict=True)]
    assert torch.equal(together, torch.cat(alone))
    weights = logits.softmax(-1)
    each = [random.sample_one(row, one) for row, one in zip(weights, u, strict=True)]
    assert random.sample(weights, torch.tensor(u, dtype=torch.float64)).tolist() == each
    usual = logits[:5]
    assert torch.equal(random.sample_softmax(usual, u[:5])[0], torch.cat(alone[:5]))


@pytest.mark.parametrize("V", [31, 4096])
def test_sample_softmax_reports_rows_without_a_softmax(V: int) -> None:
    logits = torch.zeros(4, V)
    logits[0] = -torch.inf
    logits[1, V // 2] = torch.nan
    logits[2, V - 1] = torch.inf
    assert random.sample_softmax(logits, [0.5] * 4)[1] == [False, False, False, True]


def test_sample_never_returns_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.0, 1e-30, 0.0, 2.0, 0.0]])
    for u in (2.0**-53, 1e-31, 0.5, 1 - 2.0**-53):
        assert random.sample(weights, torch.tensor([u], dtype=torch.float64)).item() in (2, 4)
    wide = torch.zeros(1, 5000)
    wide[0, [77, 4999]] = torch.tensor([1e-30, 2.0])
    for u in (2.0**-53, 1e-31, 0.5, 1 - 2.0**-53):
        assert random.sample(wide, torch.tensor([u], dtype=torch.float64)).item() in (77, 4999)
    for total in (1.0, 1.5, math.pi, 1 - 2.0**-53, 3e-300):
        weights = torch.tensor([[total, 0.0]], dtype=torch.float64)
        assert random.sample(weights, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 0


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    short, long = (random.gumbel(torch.tensor([3]), torch.tensor([8]), V) for V in (10, 51))
    assert torch.equal(short, long[:, :10])


def test_target_noise_ignores_the_start_of_the_step_and_other_streams_need_it() -> None:
    key = torch.tensor([3]), torch.tensor([8]), 10
    assert torch.equal(
        random.gumbel(*key, start=torch.tensor([1])), random.gumbel(*key, start=torch.tensor([5]))
    )
    one, other = (random.gumbel(*key, Stream.DRAFT, torch.tensor([start])) for start in (1, 5))
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="start: missing"):
        random.gumbel(*key, Stream.DRAFT)


def bits(words: Tensor) -> Tensor:
    return (words.to(torch.int64)[..., None] >> torch.arange(32)) & 1


@pytest.mark.statistical
@pytest.mark.parametrize(
    "part", ["seed", "high seed", "position", "start", "stream", "token", "level", "node"]
)
def test_neighbouring_keys_give_unrelated_words(part: str) -> None:
    """One step in any part of the key flips every output bit with probability one half."""
    n = 100_000
    base = torch.arange(n) * 3
    key: dict[str, Any] = {
        "seed": base,
        "position": base % 977,
        "start": base % 31,
        "stream": Stream.ACCEPT,
        "block": 0,
        "level": 0,
        "node": 0,
    }
    other = dict(key)
    if part == "seed":
        other["seed"] = base + 1
    elif part == "high seed":
        other["seed"] = base + 2**32
    elif part == "stream":
        other["stream"] = Stream.DRAFT
    elif part == "token":
        other["block"] = 1
    else:
        other[part] = key[part] + 1

    def words_of(key: dict[str, Any]) -> Tensor:
        names = "seed", "position", "start", "stream", "level", "node"
        return random.words(random.key(*(key[name] for name in names)), key["block"] + 1)[:, key["block"]]

    flips = (bits(words_of(key)) ^ bits(words_of(other))).flatten(1).sum(0)  # [128]
    counts = torch.stack((flips, n - flips), 1).numpy()
    chisquare.agrees(counts, np.full(counts.shape, 0.5), f"bits flipped by {part}")


@pytest.mark.statistical
@pytest.mark.parametrize("stream", Stream)
def test_uniforms_are_uniform_along_every_axis(stream: Stream) -> None:
    n, bins = 1_000_000, 500
    varied = torch.arange(n)
    axes = {"seed": (varied, ZERO, ZERO), "position": (ZERO, varied, ZERO), "start": (ZERO, ZERO, varied)}
    if stream is Stream.TARGET:
        del axes["start"]  # not a part of its key
    for axis, key in axes.items():
        u = random.uniform(*key, stream)
        counts = np.bincount((u * bins).long().numpy(), minlength=bins)
        chisquare.agrees(counts, np.full(bins, 1 / bins), f"uniforms along {axis}")
        pairs = (u[:-1:2] * 20).long() * 20 + (u[1::2] * 20).long()
        chisquare.agrees(
            np.bincount(pairs.numpy(), minlength=400), np.full(400, 1 / 400), f"pairs along {axis}"
        )


@pytest.mark.statistical
def test_streams_are_independent_at_one_position() -> None:
    n = 1_000_000
    u = [random.uniform(torch.arange(n), torch.tensor(9), torch.tensor(7), stream) for stream in Stream]
    cells = sum(((u[i] * 5).long() * 5**i for i in range(4)), start=torch.zeros(n, dtype=torch.int64))
    chisquare.agrees(
        np.bincount(cells.numpy(), minlength=625), np.full(625, 1 / 625), "four streams together"
    )


@pytest.mark.statistical
def test_exponential_noise_has_its_distribution_down_to_the_smallest_values() -> None:
    noise = random.exponential(torch.arange(400), torch.tensor(1), 50_000).double().flatten()
    # Races over large vocabularies are decided in the lowest quantiles: equal steps of log-probability there.
    cuts = np.concatenate(([0.0], 2.0 ** np.arange(-14, 0), [0.75, 0.9, 0.99, 0.999, 1.0]))
    edges = -np.log1p(-cuts[1:-1])
    counts = np.bincount(np.searchsorted(edges, noise.numpy()), minlength=len(cuts) - 1)
    chisquare.agrees(counts, np.diff(cuts), "exponential noise")


@pytest.mark.statistical
@pytest.mark.parametrize("V", [2, 7, 3000])
def test_races_and_samples_follow_the_softmax(V: int) -> None:
    """3000 tokens are sampled in two steps, a stretch and then a token. A few have most of the mass."""
    n = tiers.sized(240_000, 1_000_000) if V < 100 else tiers.sized(20_000, 40_000)
    logits = 1.5 * torch.randn(V)
    if V > 100:
        logits = torch.full((V,), -7.0)
        logits[torch.tensor([0, 1, 2, 255, 256, 511, 700, 701, 1535, 2047, 2998, 2999])] = torch.randn(12)
    p = logits.double().softmax(-1)
    for name, counts in (("races", torch.zeros(V)), ("samples", torch.zeros(V))):
        for seeds in torch.arange(n).view(-1, 20_000):
            if name == "races":
                tokens = random.race(logits, random.gumbel(seeds, ZERO, V))
            else:
                weights = p.to(torch.float32).expand(len(seeds), V)
                tokens = random.sample(weights, random.uniform(seeds, ZERO, ZERO, Stream.RESIDUAL))
            counts += torch.bincount(tokens, minlength=V)
        chisquare.agrees(counts.numpy(), p.numpy(), f"{name} over {V}")
