"""Latency of verification: outpace's kernels, its eager path, Transformers' function, and peers.

Times are medians of a call's microseconds. *Cold* inputs rotate over more memory than the device caches;
*hot* inputs are the same each time. *graph* is inside a CUDA graph; *eager* is launched from Python. The
floor is the time to read the logits once, at the bandwidth of a large copy in the same run.
"""

from __future__ import annotations

import importlib.util
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import _speculative_sampling

import outpace
from outpace.sampling import SamplingParams, warp
from outpace.verification import eager, sample
from outpace.verification.block import Block
from outpace.verification.rules import Rule, parse

VOCABULARIES = (32000, 51865, 128256, 151936, 256000)
DRAFTS = (1, 5, 10, 20)
BATCHES = (1, 8, 64)
ROTATED = 160 << 20  # bytes that inputs rotate over: more than any cache
CALLS = 200  # most calls in one graph

FILTER = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
PROCESSORS = (
    TemperatureLogitsWarper(FILTER.temperature),
    TopKLogitsWarper(FILTER.top_k),
    TopPLogitsWarper(FILTER.top_p),
)

# Older versions of Transformers ask whether the drafts end the text.
OPTIONS = (
    {"is_done_candidate": False}
    if "is_done_candidate" in inspect.signature(_speculative_sampling).parameters
    else {}
)

Side = Callable[["Inputs"], Any]


@dataclass(frozen=True)
class Inputs:
    """Draft tokens and logits of one step."""

    tokens: Tensor  # [B, g]
    draft: Tensor  # [B, g, V]
    target: Tensor  # [B, g+1, V]
    seed: Tensor  # [B]
    position: Tensor  # [B]
    drawn: tuple[Tensor, Tensor, Tensor] | None = None  # lse, cut and tie of the draft's logits, [B, g] each

    @classmethod
    def random(cls, B: int, g: int, V: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Return draft tokens from logits near the target's, so that some are accepted and some rejected."""
        target = (2 * torch.randn(B, g + 1, V, device=device)).to(dtype)
        draft = (target[:, :g] + 0.7 * torch.randn(B, g, V, device=device)).to(dtype)
        noise = torch.empty(B, g, V, device=device).exponential_()
        tokens = (draft.float().softmax(-1) / noise).argmax(-1)
        seed = torch.randint(2**62, (B,), device=device)
        return cls(tokens, draft, target, seed, torch.arange(B, device=device))

    def filtered(self) -> Inputs:
        """Return draft tokens sampled with ``FILTER``, and what ``sample`` found out about them."""
        each = [
            sample(self.draft[:, i], seed=self.seed, position=self.position, step=i, sampling=FILTER)
            for i in range(self.tokens.shape[1])
        ]
        tokens, lse = torch.stack([one.tokens for one in each], 1), torch.stack([one.lse for one in each], 1)
        cuts = [one.cut for one in each if one.cut is not None]
        ties = [one.tie for one in each if one.tie is not None]
        if not cuts:
            return replace(self, tokens=tokens)
        return replace(self, tokens=tokens, drawn=(lse, torch.stack(cuts, 1), torch.stack(ties, 1)))

    @property
    def nbytes(self) -> int:
        """Bytes of the logits that have to be read.

        Each is read once, and those that the next token comes from are read again.
        """
        B, g, V = self.draft.shape
        return (2 * g + 2) * V * B * self.draft.element_size()


@dataclass(frozen=True)
class KernelTiming:
    """Result of one method at one size, in microseconds; None where it cannot run that way."""

    side: str
    V: int
    g: int
    B: int
    graph_cold: float | None
    graph_hot: float | None
    eager: float
    floor: float
    gigabytes_per_second: float | None
    peak_bytes: int | None


def ours(made: Inputs, rule: Rule | str = "token", **more: Any) -> Any:
    """Verify with ``outpace.verify``."""
    return outpace.verify(
        made.tokens, made.draft, made.target, rule=rule, seed=made.seed, position=made.position, **more
    )


def ours_eager(made: Inputs) -> Any:
    """Verify with the eager path."""
    block = Block(made.tokens, made.draft, made.target, None, made.seed, made.position)
    return eager.verify(block, parse("token"))


def transformers(made: Inputs) -> Any:
    """Verify with Transformers' function, in a loop, since it takes one row."""
    g = made.tokens.shape[1]
    rows = (slice(b, b + 1) for b in range(len(made.tokens)))
    return [_speculative_sampling(made.tokens[b], made.draft[b], g, made.target[b], **OPTIONS) for b in rows]


def ours_filtered(made: Inputs, **more: Any) -> Any:
    """Verify with ``outpace.verify`` and the filters of ``FILTER``."""
    return ours(made, sampling=FILTER, draft_sampling=FILTER, **more)


def ours_told(made: Inputs) -> Any:
    """Verify as ``ours_filtered``, with what sampling the draft tokens found out."""
    assert made.drawn is not None
    return ours_filtered(made, draft_lse=made.drawn[0], draft_cut=made.drawn[1:])


def eager_filtered(made: Inputs) -> Any:
    """Apply ``FILTER`` and verify with the eager path."""
    target, draft = (warp(logits.float(), [FILTER]) for logits in (made.target, made.draft))
    return eager.verify(Block(made.tokens, draft, target, None, made.seed, made.position), parse("token"))


def transformers_filtered(made: Inputs) -> Any:
    """Apply Transformers' processors, then its function, row by row."""
    ids = made.tokens[:1, :0]

    def adjusted(logits: Tensor) -> Tensor:
        for processor in PROCESSORS:
            logits = processor(ids, logits)
        return logits

    made = replace(
        made,
        draft=torch.stack([adjusted(row.float()) for row in made.draft]),
        target=torch.stack([adjusted(row.float()) for row in made.target]),
    )
    return transformers(made)


def peers(folder: Path, filtered: bool = False) -> dict[str, Side]:
    """Return the verification function of each Python file in a folder, by file name.

    Args:
        folder: Folder of files with a function ``verify(draft_tokens, draft_logits, target_logits)``.
        filtered: Take ``verify_filtered`` instead, where there is one, for adjusted logits.

    Raises:
        ValueError: A file has no such function, or no file has one.
    """
    found: dict[str, Side] = {}
    for path in sorted(folder.glob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not callable(getattr(module, "verify", None)):
            raise ValueError(
                f"peers: {path.name} has no function verify(draft_tokens, draft_logits, target_logits)"
            )
        verify = getattr(module, "verify_filtered", None) if filtered else module.verify
        if verify is not None:
            found[path.stem] = _called(verify)
    if not found:
        raise ValueError(f"peers: no Python file{' with verify_filtered' if filtered else ''} in {folder}")
    return found


def _called(verify: Callable[[Tensor, Tensor, Tensor], Any]) -> Side:
    return lambda made: verify(made.tokens, made.draft, made.target)


def measure(
    device: torch.device,
    dtype: torch.dtype,
    vocabularies: Sequence[int] = VOCABULARIES,
    drafts: Sequence[int] = DRAFTS,
    batches: Sequence[int] = BATCHES,
    others: dict[str, Side] | None = None,
    filtered: bool = False,
) -> Iterator[KernelTiming]:
    """Measure all methods at all sizes, in turn.

    Transformers' loop is left out at batches above 8.
    """
    rate = bandwidth(device)
    for V in vocabularies:
        for g in drafts:
            for B in batches:
                sets = rotated(B, g, V, device, dtype)
                if filtered:
                    sets = [one.filtered() for one in sets]
                size = sets[0]
                for name, side in {**own_sides(B, device, filtered), **(others or {})}.items():
                    captured = name != "transformers" and device.type == "cuda"
                    cold = in_graph(side, sets) if captured else None
                    hot = in_graph(side, [size] * 20) if captured else None
                    yield KernelTiming(
                        name,
                        V,
                        g,
                        B,
                        cold,
                        hot,
                        from_python(side, sets),
                        round(size.nbytes / rate * 1e6, 2),
                        None if cold is None else round(size.nbytes / cold / 1e3, 1),
                        peak(side, size) if device.type == "cuda" else None,
                    )


def own_sides(B: int, device: torch.device, filtered: bool) -> dict[str, Side]:
    """Return the methods that are measured at a size, besides peers."""
    if not filtered:
        sides: dict[str, Side] = {"outpace": ours, "outpace eager": ours_eager}
    else:
        sides = {"outpace": ours_filtered}
        if device.type == "cuda":
            sides["outpace told"] = ours_told
        sides["outpace eager"] = eager_filtered
    if B <= 8:
        sides["transformers"] = transformers_filtered if filtered else transformers
    return sides


def rotated(B: int, g: int, V: int, device: torch.device, dtype: torch.dtype) -> list[Inputs]:
    """Return inputs to use in turn; together they exceed a GPU's caches."""
    first = Inputs.random(B, g, V, device, dtype)
    count = max(3, min(CALLS, ROTATED // first.nbytes + 1)) if device.type == "cuda" else 3
    return [first, *(Inputs.random(B, g, V, device, dtype) for _ in range(count - 1))]


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a large copy, read and written."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source), device, 10) / 1e6)


def in_graph(side: Side, sets: Sequence[Inputs], repeats: int = 15) -> float | None:
    """Return microseconds per call in a CUDA graph with one call per input; None if it cannot be captured."""
    for made in sets[:3]:
        side(made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = [side(made) for made in sets]
    except RuntimeError:
        return None
    taken = timed(graph.replay, sets[0].draft.device, repeats) / len(sets)
    del kept
    return round(taken, 2)


def from_python(side: Side, sets: Sequence[Inputs], repeats: int = 5) -> float:
    """Return microseconds of a call from Python, the device kept busy."""
    calls = at_a_time(sets)
    in_turn(side, sets, calls)
    return round(wall(lambda: in_turn(side, sets, calls), sets[0].draft.device, repeats) / calls, 2)


def at_a_time(sets: Sequence[Inputs]) -> int:
    """Return the number of calls that are timed together."""
    return 40 if sets[0].draft.is_cuda else 3


def in_turn(side: Side, sets: Sequence[Inputs], calls: int) -> None:
    """Call a method on inputs in turn."""
    for i in range(calls):
        side(sets[i % len(sets)])


def peak(side: Side, made: Inputs) -> int:
    """Return the bytes of device memory that a call takes besides its inputs, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = side(made)
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def timed(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median microseconds of a run, by the device's clock where it has one."""
    if device.type != "cuda":
        return wall(run, device, repeats)
    for _ in range(3):
        run()
    taken: list[float] = []
    for _ in range(repeats):
        begun, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        taken.append(begun.elapsed_time(ended) * 1e3)
    return statistics.median(taken)


def wall(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median microseconds of a run, by the host's clock."""
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(taken)
