"""Models whose weights were rearranged once, for forward passes over a paged KV cache.

Linear layers with the same input become one. The model's own parameters become views of the combined weights.
So no weight is stored twice, and the model can still be used.
"""

from __future__ import annotations

import importlib.util
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from outpace.models.causal import state_of
from outpace.models.paged import Pages, Shape

# Numbers of activations in the kernels
ACTIVATIONS = {"silu": 1, "swish": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2, "gelu": 3, "relu": 4}
MIN_CAPABILITY = 8, 0  # least compute capability for the kernels
MAX_HEAD_BYTES, MAX_QUERY_BYTES = 512, 16384  # most bytes of a head, and of a block's queries
COUNTERS = 1 << 16  # most rows times key heads of the attention kernel for few queries


@dataclass(frozen=True)
class Product:
    """A linear layer, or several side by side."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    @classmethod
    @torch.inference_mode(False)  # else the model's parameters would work in inference mode only
    def of(cls, *layers: nn.Linear) -> Product:
        """Combine layers with the same input; their parameters become views of the combined weight."""
        if len(layers) == 1:
            return cls(layers[0].weight.detach(), None if layers[0].bias is None else layers[0].bias.detach())
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = None
        if any(layer.bias is not None for layer in layers):  # Whisper's keys have none
            zeros = (weight.new_zeros(layer.out_features) for layer in layers)
            biases = (
                one if layer.bias is None else layer.bias.detach()
                for layer, one in zip(layers, zeros, strict=True)
            )
            bias = torch.cat(list(biases))
        at = 0
        for layer in layers:
            part = slice(at, at + layer.out_features)
            _set_parameter(layer, "weight", weight[part])
            if bias is not None and layer.bias is not None:
                _set_parameter(layer, "bias", bias[part])
            at = part.stop
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` times the weight transposed, plus the bias."""
        return linear(x, self.weight, self.bias)


def _set_parameter(layer: nn.Linear, name: str, value: Tensor) -> None:
    """Set a layer's parameter without replacing the object that others may hold.

    A parameter made in inference mode is replaced, because it could not be used together with normal tensors
    outside inference mode.
    """
    parameter = getattr(layer, name)
    if parameter.is_inference():
        setattr(layer, name, nn.Parameter(value, parameter.requires_grad))
    else:
        parameter.data = value


class Rearranged(ABC):
    """A Transformers model with combined weights, and its forward passes.

    A forward pass reads tokens and positions from tensors. It depends on nothing else that could change, so a
    CUDA graph can capture it. The positions of each row are consecutive. A position of -1 is padding, at the
    end of a row.

    Args:
        model: The model.

    Attributes:
        has_kernels: Whether Triton kernels run the forward passes.
        vocab_size: Size of the vocabulary.
        tokens: Most tokens of a sequence, and one for what lies beyond.
        dtype: Dtype of the weights.
        device: Device of the weights.
    """

    has_kernels: bool
    vocab_size: int
    tokens: int
    dtype: torch.dtype
    device: torch.device

    def __init__(self, model: Any) -> None:
        # Weak, so that the weights of a decoder that is kept between calls are freed with the model
        self._base = weakref.ref(model)
        embedding = model.get_input_embeddings().weight
        self.dtype, self.device = embedding.dtype, embedding.device

    def _finish(self, modules: Iterable[nn.Module]) -> None:
        """Note the state of these modules, whose weights forward passes read, after they were combined."""
        self._submodules = [weakref.ref(one) for one in modules]
        self._combined_state = self.state
        # Counters of the attention kernel, 0 between launches
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)

    @property
    def base(self) -> Any:
        """The Transformers model; None after it was freed."""
        return self._base()

    @property
    def is_current(self) -> bool:
        """True if the model still has the weights that were combined, and no other layers or hooks."""
        return self.state[:2] == self._combined_state[:2]

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """Numbers by which changes of the model are noticed, as ``state_of`` returns them."""
        return state_of(module for one in self._submodules if (module := one()) is not None)

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Shape of the keys and values."""

    @abstractmethod
    def fill(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> None:
        """Write keys and values of tokens ``[B, n]`` at positions ``[B, n]`` into the KV cache.

        With ``prefill``, any number of tokens has the same kernels, where that is faster.
        """

    @abstractmethod
    def logits(self, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> Tensor:
        """Return logits ``[B, n, V]`` after each of the tokens, and fill the KV cache.

        With ``prefill``, any number of tokens has the same kernels, where that is faster.
        """

    @abstractmethod
    def last_logits(self, ids: Tensor, positions: Tensor, pages: Pages, counts: Tensor) -> Tensor:
        """Return logits ``[B, V]`` after token ``counts[b] - 1`` of each row, and fill the KV cache."""

    @abstractmethod
    def launch_once(self, B: int, n: int, pages: Pages) -> Tensor:
        """Launch each kernel of a prefill, and of a forward pass over tokens ``[B, n]``, once.

        Nothing is written to the KV cache.

        Returns:
            Undefined logits ``[B, n, V]``.
        """


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for weights of this dtype on this device."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
        and dtype in (torch.float16, torch.bfloat16, torch.float32)
        and importlib.util.find_spec("triton") is not None
    )


def headroom_of(weight: Tensor, shift: float = 0.0) -> float:
    """Return the factor of rows that are scaled by a norm's weights, so that float16 holds them."""
    if weight.dtype != torch.float16:
        return 1.0
    largest = float((weight.float() + shift).abs().max())
    return float(2.0 ** -max(0, math.ceil(math.log2(max(largest, 1.0)))))


def kind_of(activation: Any) -> int:
    """Return the number of an activation module in the kernels; 0 if they do not have it."""
    return next((i for name, i in ACTIVATIONS.items() if type(activation) is type(ACT2FN[name])), 0)


def why_not_rearranged(model: Any, modules: Iterable[nn.Module], products: list[Any]) -> str | None:
    """Return the reason why the weights of a model cannot be combined, or None if they can.

    Args:
        model: The model.
        modules: Its modules whose weights the forward passes would read.
        products: Its linear layers that would be combined.
    """
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return "has hooks on its layers"
    for module in products:
        if type(module) is not nn.Linear or type(module.weight.data) is not Tensor:
            return f"has layers of another kind than linear layers ({type(module).__name__})"
        if not module.weight.is_contiguous():
            return "has weights that are not contiguous"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "is on several devices"
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        return "has weights of several dtypes"
    return None
