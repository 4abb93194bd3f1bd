"""Forward passes of a Decoder never change the model, so threads may share it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import outpace
from outpace import Decoder, Fixed
from outpace.models.view import view_of
from tests import tiers
from tests.tiny import tiny

PASSES = tiers.sized(
    200, 10_000
)  # in all threads; the bug that this test guards against showed in 2 or 3 of 100
SWITCH_INTERVAL = 1e-5  # seconds; CPython's own is 5e-3


def test_a_view_shares_weights_and_has_its_own_config_and_forwards() -> None:
    model = tiny()
    config, head = object(), model.get_output_embeddings()
    view: Any = view_of(model, {head: lambda x: x}, config)
    assert [a is b for a, b in zip(view.parameters(), model.parameters(), strict=True)] != []
    assert all(a is b for a, b in zip(view.parameters(), model.parameters(), strict=True))
    assert view.config is view.model.layers[0].self_attn.config is config
    assert model.config is model.model.layers[0].self_attn.config is not config
    assert view.lm_head(3) == 3
    assert "forward" not in head.__dict__


def test_a_view_of_modules_used_twice_uses_their_copies_twice() -> None:
    layer = torch.nn.Linear(2, 2)
    view: Any = view_of(torch.nn.Sequential(layer, layer), {})
    assert view[0] is view[1] is not layer


def test_hooks_set_after_the_view_was_made_are_called() -> None:
    model = tiny()
    decoder = Decoder(model)
    decoder.generate([5, 6, 7], max_new_tokens=2)
    called = []
    model.model.layers[0].register_forward_hook(lambda *_: called.append(1))
    decoder.generate([5, 6, 7], max_new_tokens=2)
    assert called


def test_a_module_replaced_after_the_view_was_made_is_used() -> None:
    model = tiny()
    decoder = Decoder(model)
    before = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=4).token_ids
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    torch.nn.init.zeros_(head.weight)
    model.lm_head = head
    assert decoder.generate([5, 6, 7], temperature=0, max_new_tokens=4).token_ids == [0] * 4 != before


def test_a_forward_pass_does_not_change_the_models_configuration() -> None:
    model = tiny()
    seen = set()
    model.model.layers[0].register_forward_hook(lambda *_: seen.add(model.config._attn_implementation))
    Decoder(model, tiny(seed=1), num_draft_tokens=Fixed(3)).generate([5, 6, 7], max_new_tokens=8)
    assert seen == {"sdpa"}


@pytest.fixture
def switching() -> Any:
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    yield
    sys.setswitchinterval(before)


def test_interleaved_forward_passes_of_threads_on_one_model_are_correct(switching: None) -> None:
    model, small = tiny(), tiny(seed=1)
    prompt = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        logits = model(prompt).logits
    expected = model.generate(prompt, do_sample=False, max_new_tokens=8, pad_token_id=0)
    passes, errors = 0, list[BaseException]()
    decoder = Decoder(model, small, num_draft_tokens=Fixed(2))

    def forward() -> int:
        with torch.inference_mode():
            torch.testing.assert_close(model(prompt).logits, logits)
        return 1

    def decode() -> int:
        out = decoder.generate(prompt[0], temperature=0, max_new_tokens=8, ignore_eos=True)
        assert out.token_ids == expected[0, 3:].tolist()
        return int(out.stats.target_passes)

    def inside() -> int:
        stats = outpace.Stats()
        found = model.generate(
            prompt,
            custom_generate=outpace.generate,
            draft=small,
            do_sample=False,
            max_new_tokens=8,
            pad_token_id=0,
            stats=stats,
        )
        assert found.tolist() == expected.tolist()
        return stats.target_passes

    def work(one: Callable[[], int]) -> None:
        nonlocal passes
        try:
            while passes < PASSES and not errors:
                passes += one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in (forward, forward, decode, inside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert passes >= PASSES


@pytest.fixture
def uncollected() -> Any:
    """Switch the garbage collector off, as the command does."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_model_is_freed_with_its_decoder_and_without_a_garbage_collector(uncollected: None) -> None:
    model: Any = tiny()
    gone = weakref.ref(model)
    decoder = Decoder(model)
    decoder.generate([5, 6, 7], max_new_tokens=2)
    del model, decoder
    assert gone() is None


def test_a_model_is_freed_after_custom_generate_without_a_garbage_collector(uncollected: None) -> None:
    model: Any = tiny()
    gone = weakref.ref(model)
    model.generate(
        torch.tensor([[5, 6, 7]]),
        custom_generate=outpace.generate,
        draft="lookup",
        do_sample=False,
        max_new_tokens=2,
        pad_token_id=0,
    )
    del model
    assert gone() is None


def test_hidden_states_of_a_model_are_recorded_once_beside_a_decoder() -> None:
    model = tiny()
    ids = torch.tensor([[5, 6, 7]])
    expected = len(tiny()(ids, output_hidden_states=True).hidden_states)
    model.config.output_hidden_states = True
    Decoder(model).generate([5, 6, 7], max_new_tokens=2)
    assert len(model(ids, output_hidden_states=True).hidden_states) == expected


def test_a_forward_set_on_a_module_after_the_first_call_is_used() -> None:
    model = tiny()
    decoder = Decoder(model)
    decoder.generate([5, 6, 7], temperature=0, max_new_tokens=4)
    model.lm_head.forward = lambda x: torch.zeros(*x.shape[:-1], model.config.vocab_size)
    assert decoder.generate([5, 6, 7], temperature=0, max_new_tokens=4).token_ids == [0] * 4


def test_switched_adapters_take_effect_in_a_decoder_of_the_inner_model() -> None:
    peft = pytest.importorskip("peft")
    model = tiny()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config, "a")
    wrapped.add_adapter("b", config)
    decoder = Decoder(model)
    for name in ("a", "b", "a"):
        wrapped.set_adapter(name)
        text = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=8, ignore_eos=True).token_ids
        expected = model.generate(
            torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=8, pad_token_id=0
        )
        assert text == expected[0, 3:].tolist()
