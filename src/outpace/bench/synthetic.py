"""Pairs of models with real shapes and a chosen acceptance rate, without weights to fetch.

Every layer is computed, but adds next to nothing. So a model is a known bigram model. The embedding of token
x holds a code c(x) in its first entries. The head's row of token y holds a code s·c'(y) of the tokens that it
follows. The logit of y after x is then s·c(x)·c'(y), normal with deviation s. The draft's head has noise of
deviation σ on its codes. A search finds the σ for the requested acceptance rate α = E[Σ min(p, q)].

A target without a draft is for prompt lookup. It has few words, so that its texts repeat. Its s is the one at
which the likeliest next word has probability α.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from outpace.models.auto import auto_class

CODE = 64  # entries of a code
STEEPNESS = 6.0  # s: standard deviation of the logits
FAINT = 1e-4  # factor of the layers' own output
# Names of the weights that compute it
OUTPUTS = tuple(f"{name}.weight" for name in ("o_proj", "down_proj", "out_proj", "fc2", ".o", ".wo"))
SAMPLE = 256  # contexts that α is averaged over
WRITTEN = 8  # tokens sampled from the target before each context: some are more frequent than others
WORDS = 32  # distinct tokens in texts for prompt lookup
LOOKUP = "lookup"  # in the place of a draft's shape: prompt lookup


def shape_of(family: str, V: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Shape:
    """Return the fields of a Transformers configuration."""
    return {
        "model_type": family,
        "vocab_size": V,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5 if family == "llama" else 1e-6,
        "tie_word_embeddings": False,
    }


Shape = dict[str, Any]
SHAPES: dict[str, Shape] = {
    "llama2-7b": shape_of("llama", 32000, 4096, 11008, 32, 32, 32),
    "llama2-1.3b": shape_of("llama", 32000, 2048, 5504, 24, 16, 16),
    "llama3-8b": shape_of("llama", 128256, 4096, 14336, 32, 32, 8),
    "llama3-1b": shape_of("llama", 128256, 2048, 8192, 16, 32, 8),
    "qwen2-7b": shape_of("qwen2", 151936, 3584, 18944, 28, 28, 4),
    "qwen2-0.5b": shape_of("qwen2", 151936, 896, 4864, 24, 14, 2),
    "smollm2-135m": shape_of("llama", 49152, 576, 1536, 30, 9, 3),
}
PAIRS = {
    "llama2-7b/1.3b": ("llama2-7b", "llama2-1.3b"),
    "llama3-8b/1b": ("llama3-8b", "llama3-1b"),
    "qwen2-7b/0.5b": ("qwen2-7b", "qwen2-0.5b"),
    "smollm2-135m/lookup": ("smollm2-135m", LOOKUP),
}


@dataclass(frozen=True)
class Pair:
    """Two models with the requested acceptance rate; or one model whose texts repeat, and None.

    Attributes:
        target: The target.
        draft: The draft; None for prompt lookup.
        alpha: Acceptance rate of these models, computed with their own weights.
        sigma: Deviation of the noise on the draft's codes.
        words: Number of distinct tokens in texts, the first ones of the vocabulary.
    """

    target: Any
    draft: Any
    alpha: float
    sigma: float
    words: int


@dataclass(frozen=True)
class Codes:
    """Random codes that both models of a pair are made from, float32 ``[V, CODE]`` each."""

    before: Tensor  # c, of unit length times √CODE
    after: Tensor  # c'
    noise: Tensor

    @classmethod
    def random(cls, V: int, seed: int, device: torch.device | str = "cpu") -> Codes:
        """Return the codes of a vocabulary of V tokens."""
        noise = torch.Generator(device).manual_seed(seed)
        before, after, other = torch.randn(3, V, CODE, generator=noise, device=device)
        return cls(torch.nn.functional.normalize(before) * math.sqrt(CODE), after, other)

    def contexts(self) -> Tensor:
        """Return ``[SAMPLE]`` tokens that the target would sample."""
        V = len(self.before)
        ids = torch.arange(SAMPLE, device=self.before.device) * (V // SAMPLE or 1) % V
        noise = torch.Generator(self.before.device).manual_seed(0)
        for _ in range(WRITTEN):
            p = (self.before[ids] @ self.after.T * (STEEPNESS / math.sqrt(CODE))).softmax(-1)
            ids = torch.multinomial(p, 1, generator=noise)[:, 0]
        return ids

    def head(self, sigma: float) -> Tensor:
        """Return the codes of the head, with noise of deviation ``sigma``."""
        return self.after + sigma * self.noise


def pair(
    target: str | Mapping[str, Any],
    draft: str | Mapping[str, Any],
    alpha: float,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Pair:
    """Return models whose draft tokens are accepted with probability ``alpha`` at temperature 1.

    Args:
        target: Shape of the target: a name (``SHAPES``), or fields of a Transformers configuration with its
            ``model_type``.
        draft: Shape of the draft. With ``LOOKUP`` there is only the target.
        alpha: Acceptance rate. With ``LOOKUP``, the probability of the likeliest token.
        seed: Seed of the weights.
        device: Device of the models.
        dtype: Dtype of the models.

    Raises:
        ValueError: The vocabularies differ in size, or ``alpha`` cannot be reached.
    """
    if draft == LOOKUP:
        return _repeating(SHAPES[target] if isinstance(target, str) else target, alpha, seed, device, dtype)
    shapes = [dict(SHAPES[one] if isinstance(one, str) else one) for one in (target, draft)]
    sizes = {shape["vocab_size"] for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(f"draft: its vocabulary has another size: {sorted(sizes)}; they must be equal")
    codes = Codes.random(sizes.pop(), seed, device)
    sigma = noise_for(codes, alpha)
    large = bigram(shapes[0], codes, 0.0, seed=seed, device=device, dtype=dtype)
    small = bigram(shapes[1], codes, sigma, seed=seed + 1, device=device, dtype=dtype)
    return Pair(large, small, acceptance(large, small, codes), sigma, large.config.vocab_size)


def _repeating(
    shape: Mapping[str, Any], alpha: float, seed: int, device: torch.device | str, dtype: torch.dtype
) -> Pair:
    codes = Codes.random(shape["vocab_size"], seed, device)
    codes.after[WORDS:] = 0.0
    logits = codes.before[:WORDS] @ codes.after.T / math.sqrt(CODE)
    s = solved(lambda s: -likeliest(s * logits), -alpha, 200.0)
    target = bigram(shape, codes, 0.0, seed=seed, device=device, dtype=dtype, steepness=s)
    ids = torch.arange(WORDS, device=target.device)[:, None]
    with torch.inference_mode():
        found = likeliest(target(input_ids=ids, use_cache=False).logits[:, -1])
    return Pair(target, None, found, 0.0, WORDS)


def likeliest(logits: Tensor) -> float:
    """Return the mean probability of the likeliest token."""
    return float(logits.float().softmax(-1).amax(-1).mean())


def noise_for(codes: Codes, alpha: float) -> float:
    """Return the σ at which draft tokens are accepted with probability ``alpha``, by bisection.

    More noise lowers the acceptance rate.

    Raises:
        ValueError: ``alpha`` cannot be reached.
    """
    V = len(codes.before)
    x = codes.before[codes.contexts()]
    p = (x @ codes.after.T) * STEEPNESS / math.sqrt(CODE)
    other = (x @ codes.noise.T) * STEEPNESS / math.sqrt(CODE)

    def acceptance_at(sigma: float) -> float:
        return overlap(p, p + sigma * other)

    if not acceptance_at(4.0) < alpha <= 1:
        raise ValueError(f"alpha: got {alpha}; with {V} tokens it must lie in {acceptance_at(4.0):.2f}..1")
    return solved(acceptance_at, alpha, 4.0)


def solved(falling: Callable[[float], float], value: float, high: float) -> float:
    """Return where a falling function has a value, between 0 and ``high``, by bisection."""
    low = 0.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2


def overlap(p: Tensor, q: Tensor) -> float:
    """Return the acceptance rate E[Σ min(p, q)] of logits ``[n, V]``."""
    return float(torch.minimum(p.float().softmax(-1), q.float().softmax(-1)).sum(-1).mean())


@torch.inference_mode()
def acceptance(target: Any, draft: Any, codes: Codes) -> float:
    """Return the acceptance rate of two models after single tokens.

    A bigram model depends on nothing else.
    """
    ids = codes.contexts()[:, None].to(target.device)
    p, q = (model(input_ids=ids, use_cache=False).logits[:, -1] for model in (target, draft))
    return overlap(p, q)


@torch.no_grad()
def bigram(
    shape: Mapping[str, Any],
    codes: Codes,
    sigma: float,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    steepness: float = STEEPNESS,
) -> Any:
    """Return a Transformers model of a shape, whose layers are computed but add next to nothing.

    An encoder-decoder model's decoder is the bigram model.

    Raises:
        ValueError: The hidden size is smaller than a code.
    """
    fields = dict(shape)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    if config.hidden_size < CODE:
        raise ValueError(f"shape: hidden_size is {config.hidden_size}; codes take {CODE} entries")
    with torch.device(device):
        model = auto_class(config).from_config(config, dtype=dtype)
    if model.get_output_embeddings().weight is model.get_decoder().embed_tokens.weight:  # T5 ties them
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype)
        model.set_output_embeddings(head)
        model.config.tie_word_embeddings = model.config.scale_decoder_outputs = False
    noise = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=noise)
            if name.endswith(OUTPUTS):
                parameter.mul_(FAINT)
        else:
            parameter.fill_(0.0 if name.endswith("bias") or config.model_type.startswith("gemma") else 1.0)
    decoder, head = model.get_decoder(), model.get_output_embeddings().weight
    embedding = decoder.embed_tokens.weight
    if hasattr(decoder, "embed_positions"):
        decoder.embed_positions.weight.zero_()
    embedding.zero_()
    embedding[:, :CODE] = codes.before.to(dtype)
    head.zero_()
    # The last norm scales an embedding to length √hidden_size.
    head[:, :CODE] = (codes.head(sigma) * (steepness / math.sqrt(config.hidden_size))).to(dtype)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    if config.is_encoder_decoder:  # without a family's forced or suppressed tokens
        model.generation_config = transformers.GenerationConfig(decoder_start_token_id=1)
    model.generation_config.pad_token_id = 0
    return model.eval()
