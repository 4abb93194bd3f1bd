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
DRAFT_LENGTHS = (1, 5, 10, 20)
BATCHES = (1, 8, 64)
ROTATED = 160 << 20  # bytes that inputs rotate over: more than any cache
CALLS = 200  # most calls in one graph

FILTER = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
PROCESSORS = (
    TemperatureLogitsWarper(FILTER.temperature),
    TopKLogitsWarper(FILTER.top_k),
    TopPLogitsWarper(FILTER.top_p),
)

# Older versions of Transformers have an argument for whether the draft tokens end the text.
OPTIONS = (
    {"is_done_candidate": False}
    if "is_done_candidate" in inspect.signature(_speculative_sampling).parameters
    else {}
)

Method = Callable[["Inputs"], Any]


@dataclass(frozen=True)
class Inputs:
    """Draft tokens and logits of one step."""

    tokens: Tensor  # [B, g]
    draft: Tensor  # [B, g, V]
    target: Tensor  # [B, g+1, V]
    seed: Tensor  # [B]
    position: Tensor  # [B]
    draft_stats: tuple[Tensor, Tensor, Tensor] | None = None  # lse, cut and tie of the draft's logits

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
        """Return draft tokens sampled with ``FILTER``, with the statistics that ``sample`` computed."""
        each = [
            sample(self.draft[:, i], seed=self.seed, position=self.position, step=i, sampling=FILTER)
            for i in range(self.tokens.shape[1])
        ]
        tokens, lse = torch.stack([one.tokens for one in each], 1), torch.stack([one.lse for one in each], 1)
        cuts = [one.cut for one in each if one.cut is not None]
        ties = [one.tie for one in each if one.tie is not None]
        if not cuts:
            return replace(self, tokens=tokens)
        return replace(self, tokens=tokens, draft_stats=(lse, torch.stack(cuts, 1), torch.stack(ties, 1)))

    @property
    def nbytes(self) -> int:
        """Bytes of the logits that have to be read.

        Each is read once, and those that the next token comes from are read again.
        """
        B, g, V = self.draft.shape
        return (2 * g + 2) * V * B * self.draft.element_size()


@dataclass(frozen=True)
class KernelTiming:
    """Times of one method at one size, in microseconds; None if it cannot run as a CUDA graph."""

    method: str
    V: int
    g: int
    B: int
    graph_cold: float | None
    graph_hot: float | None
    eager: float
    floor: float
    gigabytes_per_second: float | None
    peak_bytes: int | None


def outpace_verify(inputs: Inputs, rule: Rule | str = "token", **more: Any) -> Any:
    """Verify with ``outpace.verify``."""
    return outpace.verify(
        inputs.tokens,
        inputs.draft,
        inputs.target,
        rule=rule,
        seed=inputs.seed,
        position=inputs.position,
        **more,
    )


def outpace_eager(inputs: Inputs) -> Any:
    """Verify with the eager path."""
    block = Block(inputs.tokens, inputs.draft, inputs.target, None, inputs.seed, inputs.position)
    return eager.verify(block, parse("token"))


def transformers_verify(inputs: Inputs) -> Any:
    """Verify with Transformers' function, in a loop, since it takes one row."""
    g = inputs.tokens.shape[1]
    rows = (slice(b, b + 1) for b in range(len(inputs.tokens)))
    return [
        _speculative_sampling(inputs.tokens[b], inputs.draft[b], g, inputs.target[b], **OPTIONS) for b in rows
    ]


def outpace_filtered(inputs: Inputs, **more: Any) -> Any:
    """Verify with ``outpace.verify`` and the filters of ``FILTER``."""
    return outpace_verify(inputs, sampling=FILTER, draft_sampling=FILTER, **more)


def outpace_with_draft_stats(inputs: Inputs) -> Any:
    """Verify as ``outpace_filtered``, with the statistics from sampling the draft tokens."""
    assert inputs.draft_stats is not None
    return outpace_filtered(inputs, draft_lse=inputs.draft_stats[0], draft_cut=inputs.draft_stats[1:])


def outpace_eager_filtered(inputs: Inputs) -> Any:
    """Apply ``FILTER`` and verify with the eager path."""
    target, draft = (warp(logits.float(), [FILTER]) for logits in (inputs.target, inputs.draft))
    return eager.verify(
        Block(inputs.tokens, draft, target, None, inputs.seed, inputs.position), parse("token")
    )


def transformers_filtered(inputs: Inputs) -> Any:
    """Apply Transformers' processors, then its function, row by row."""
    ids = inputs.tokens[:1, :0]

    def adjusted(logits: Tensor) -> Tensor:
        for processor in PROCESSORS:
            logits = processor(ids, logits)
        return logits

    inputs = replace(
        inputs,
        draft=torch.stack([adjusted(row.float()) for row in inputs.draft]),
        target=torch.stack([adjusted(row.float()) for row in inputs.target]),
    )
    return transformers_verify(inputs)


def peers(folder: Path, filtered: bool = False) -> dict[str, Method]:
    """Return the verification function of each Python file in a folder, by file name.

    Args:
        folder: Folder of files with a function ``verify(draft_tokens, draft_logits, target_logits)``.
        filtered: Take ``verify_filtered`` instead, where there is one, for adjusted logits.

    Raises:
        ValueError: A file has no such function, or no file has one.
    """
    found: dict[str, Method] = {}
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
            found[path.stem] = _peer_method(verify)
    if not found:
        raise ValueError(f"peers: no Python file{' with verify_filtered' if filtered else ''} in {folder}")
    return found


def _peer_method(verify: Callable[[Tensor, Tensor, Tensor], Any]) -> Method:
    return lambda inputs: verify(inputs.tokens, inputs.draft, inputs.target)


def measure(
    device: torch.device,
    dtype: torch.dtype,
    vocabularies: Sequence[int] = VOCABULARIES,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
    batches: Sequence[int] = BATCHES,
    peer_methods: dict[str, Method] | None = None,
    filtered: bool = False,
) -> Iterator[KernelTiming]:
    """Measure all methods at all sizes, in turn.

    Transformers' loop is left out at batches above 8.
    """
    bytes_per_second = bandwidth(device)
    for V in vocabularies:
        for g in draft_lengths:
            for B in batches:
                sets = rotated(B, g, V, device, dtype)
                if filtered:
                    sets = [one.filtered() for one in sets]
                inputs = sets[0]
                for name, method in {**own_methods(B, device, filtered), **(peer_methods or {})}.items():
                    captured = name != "transformers" and device.type == "cuda"
                    cold = in_graph(method, sets) if captured else None
                    hot = in_graph(method, [inputs] * 20) if captured else None
                    yield KernelTiming(
                        name,
                        V,
                        g,
                        B,
                        cold,
                        hot,
                        from_python(method, sets),
                        round(inputs.nbytes / bytes_per_second * 1e6, 2),
                        None if cold is None else round(inputs.nbytes / cold / 1e3, 1),
                        peak(method, inputs) if device.type == "cuda" else None,
                    )


def own_methods(B: int, device: torch.device, filtered: bool) -> dict[str, Method]:
    """Return the methods that are measured at a size, besides peers."""
    if not filtered:
        methods: dict[str, Method] = {"outpace": outpace_verify, "outpace eager": outpace_eager}
    else:
        methods = {"outpace": outpace_filtered}
        if device.type == "cuda":
            methods["outpace with draft_lse"] = outpace_with_draft_stats
        methods["outpace eager"] = outpace_eager_filtered
    if B <= 8:
        methods["transformers"] = transformers_filtered if filtered else transformers_verify
    return methods


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


def in_graph(method: Method, sets: Sequence[Inputs], repeats: int = 15) -> float | None:
    """Return microseconds per call in a CUDA graph with one call per input; None if it cannot be captured."""
    for inputs in sets[:3]:
        method(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = [method(inputs) for inputs in sets]
    except RuntimeError:
        return None
    microseconds = timed(graph.replay, sets[0].draft.device, repeats) / len(sets)
    del outputs
    return round(microseconds, 2)


def from_python(method: Method, sets: Sequence[Inputs], repeats: int = 5) -> float:
    """Return microseconds of a call from Python; calls follow one another without a pause."""
    calls = calls_per_timing(sets)
    call_in_turn(method, sets, calls)
    return round(wall(lambda: call_in_turn(method, sets, calls), sets[0].draft.device, repeats) / calls, 2)


def calls_per_timing(sets: Sequence[Inputs]) -> int:
    """Return the number of calls that are timed together."""
    return 40 if sets[0].draft.is_cuda else 3


def call_in_turn(method: Method, sets: Sequence[Inputs], calls: int) -> None:
    """Call a method on inputs in turn."""
    for i in range(calls):
        method(sets[i % len(sets)])


def peak(method: Method, inputs: Inputs) -> int:
    """Return the bytes of device memory that a call takes besides its inputs, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = method(inputs)
    torch.cuda.synchronize()
    del outputs
    return torch.cuda.max_memory_allocated() - before


def timed(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median microseconds of a run, by the device's clock where it has one."""
    if device.type != "cuda":
        return wall(run, device, repeats)
    for _ in range(3):
        run()
    microseconds: list[float] = []
    for _ in range(repeats):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        microseconds.append(start.elapsed_time(end) * 1e3)
    return statistics.median(microseconds)


def wall(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median microseconds of a run, by the host's clock."""
    microseconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started_at = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        microseconds.append(1e6 * (time.perf_counter() - started_at))
    return statistics.median(microseconds)
