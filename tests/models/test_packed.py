"""Packed weights compute the same, do not change the model, and follow changes of its weights."""

from __future__ import annotations

import threading

import pytest
import torch

from outpace import Decoder, Fixed
from outpace.models.packed import X86, layers, packed_bytes, packed_forwards
from outpace.models.view import view_of
from tests.tiny import tiny


def packable() -> torch.nn.Module:
    for dtype in (torch.bfloat16, torch.float32):
        model: torch.nn.Module = tiny().to(dtype)
        if layers(model):
            return model
    pytest.skip("this processor's PyTorch packs no small layers, neither of bfloat16 nor of float32")


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 7), (3, 5), (1, 64), (2, 40)])
def test_packed_layers_compute_the_same_logits(shape: tuple[int, int]) -> None:
    model = packable()
    ids = torch.randint(61, shape)
    with torch.inference_mode():
        expected = model(ids).logits
        found = view_of(model, packed_forwards(model))(ids).logits
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0)


def test_packed_layers_add_their_bias() -> None:
    layer = torch.nn.Linear(8, 5).to(torch.bfloat16)
    model = torch.nn.Sequential(layer)
    if not layers(model):
        pytest.skip("this processor's PyTorch has no oneDNN for bfloat16")
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with torch.inference_mode():
        found = view_of(model, packed_forwards(model))(x)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 300])
def test_large_packed_float32_layers_compute_the_same_outputs(rows: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 900), torch.nn.Linear(900, 100))
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this PyTorch has no oneDNN")
    assert layers(model)[0] is model[0]
    assert len(layers(model)) == (1 if X86 else 2)  # the second is small
    x = torch.randn(rows, 600)
    with torch.inference_mode():
        expected = model(x)
        packed = view_of(model, packed_forwards(model))
        assert "forward" in packed.get_submodule("0").__dict__
        torch.testing.assert_close(packed(x), expected, atol=1e-5, rtol=1e-5)


def test_a_forward_pass_with_packed_weights_does_not_change_the_model() -> None:
    model = packable()
    seen = []
    model.register_forward_hook(
        lambda *_: seen.append(any("forward" in layer.__dict__ for layer in model.modules()))
    )
    Decoder(model, num_draft_tokens=Fixed(0), pack=True).generate([5, 6, 7], temperature=0, max_new_tokens=2)
    assert seen == [False, False]


def test_layers_with_a_replaced_forward_are_not_packed() -> None:
    model = packable()
    hooked = layers(model)[0]
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    assert hooked not in layers(model)
    assert packed_bytes(model) == sum(layer.weight.nbytes for layer in layers(model)) > 0


def test_changed_weights_are_packed_again() -> None:
    model = packable()
    decoder = Decoder(model, num_draft_tokens=Fixed(0), pack=True)
    assert "weights packed" in decoder.describe()
    decoder.generate([5, 6, 7], temperature=0, max_new_tokens=8)
    with torch.no_grad():
        for layer in layers(model):
            layer.weight.zero_()
    # The last layer's weights are 0, so every logit is 0, and the argmax is token 0.
    assert decoder.generate([5, 6, 7], temperature=0, max_new_tokens=8).token_ids == [0] * 8


def test_forget_packs_weights_again_after_undetected_changes() -> None:
    model = packable()
    decoder = Decoder(model, num_draft_tokens=Fixed(0), pack=True)
    decoder.generate([5, 6, 7], temperature=0, max_new_tokens=8)
    for layer in layers(model):
        layer.weight.data.zero_()
    decoder.forget()
    assert decoder.generate([5, 6, 7], temperature=0, max_new_tokens=8).token_ids == [0] * 8


def test_two_decoders_of_one_model_may_run_in_parallel() -> None:
    model = packable()
    decoders = [Decoder(model, num_draft_tokens=Fixed(0), pack=True) for _ in range(2)]
    texts: list[list[int]] = []

    def work(decoder: Decoder) -> None:
        texts.extend(
            decoder.generate([5, 6, 7], temperature=0, max_new_tokens=12).token_ids for _ in range(10)
        )

    threads = [threading.Thread(target=work, args=(decoder,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 20
    assert all(text == texts[0] for text in texts)


def test_a_hook_set_after_packing_is_called_and_stays() -> None:
    model = packable()
    packed, layer = packed_forwards(model), layers(model)[0]
    calls, original = [], layer.forward

    def hook(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(x)

    layer.forward = hook  # type: ignore[method-assign,assignment]
    with torch.inference_mode():
        view_of(model, packed)(torch.tensor([[1, 2]]))
    assert calls == [1]
    assert layer.forward is hook
