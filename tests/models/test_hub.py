"""Models are loaded by name: folders, GGUF files, hub ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outpace.models import hub
from tests.tiny import byte_tokenizer, tiny


def test_environment_variables_set_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTPACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / "outpace"
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "mine"))
    assert hub.cache_folder() == tmp_path / "mine"


def test_a_folder_is_loaded_with_a_message_of_dtype_and_device(tmp_path: Path) -> None:
    tiny(vocab_size=272).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    lines: list[str] = []
    model, tokenizer = hub.load_model(tmp_path, dtype="float32", device="cpu", tell=lines.append)
    assert lines == [f"{tmp_path}: float32 on cpu"]
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer("abc").input_ids


def test_wrong_model_names_raise_errors_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for name, why in (
        (tmp_path / "none", "no such file or folder"),
        ("missing.gguf", "no such file or folder"),
        (tmp_path / "notes.txt", "not a GGUF file"),
        (tmp_path, "has no config.json"),
        ("", "the name is empty"),
    ):
        with pytest.raises(ValueError, match=why):
            hub.load_model(name)


def test_unknown_devices_and_dtypes_raise_errors() -> None:
    with pytest.raises(ValueError, match="device: got 'gpu'"):
        hub.load_model(None, device="gpu")
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        hub.load_model(None, device="cpu", dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="this PyTorch sees no CUDA device"):
            hub.load_model(None, device="cuda")


def test_an_unreachable_hub_raises_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="nothing: no such file or folder, and the hub cannot be reached"):
        hub.load_model("no-one/nothing")
    with pytest.raises(ValueError, match="no such file, folder or hub model"):
        hub.load_model("not a name!")


def test_errors_name_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    tiny(vocab_size=272).save_pretrained(tmp_path)
    with pytest.raises(OSError, match="has no tokenizer"):
        hub.load_model(tmp_path, device="cpu")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(OSError, match=f"{tmp_path}: cannot be loaded"):
        hub.load_model(tmp_path, device="cpu")
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(OSError, match=r"half\.gguf: cannot be loaded"):
        hub.load_model(tmp_path / "half.gguf", device="cpu")
