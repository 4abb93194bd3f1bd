"""GGUF files are converted once, kept by content, and removed by age."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import termios
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.models import gguf, gguf_cache, hub
from tests.gguf_file import write_gguf
from tests.tiny import greedy

PROMPT = [1, 70, 70, 71, 256]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(gguf_cache.LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(gguf_cache, "OVERHEAD", 0)
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.Q8_0.gguf")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the GGUF files that are read, one entry per conversion."""
    seen: list[Path] = []
    original = gguf.read

    def read(path: Path, *rest: Any) -> Any:
        seen.append(path)
        return original(path, *rest)

    monkeypatch.setattr(gguf, "read", read)
    return seen


def load(file: Path, dtype: str = "float32", **options: Any) -> tuple[Any, Any, list[str]]:
    lines: list[str] = []
    model, tokenizer = hub.load_model(file, device="cpu", dtype=dtype, tell=lines.append, **options)
    return model, tokenizer, lines


def names() -> list[str]:
    return [one.name for one in gguf_cache.converted()]


def aged_file(file: Path, seconds: float = 10) -> Path:
    """Return the same file, with a change time some seconds in the past."""
    then = file.stat().st_mtime - seconds
    os.utime(file, (then, then))
    return file


def test_a_gguf_file_is_converted_once(file: Path, reads: list[Path]) -> None:
    _, _, lines = load(file)
    assert lines == [
        f"{file}: converting it once to safetensors, 0.0 GB in float32",
        f"{file}: float32 on cpu",
    ]
    assert load(file)[2] == [f"{file}: float32 on cpu"]
    assert reads == [file]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_converted_copy_has_the_weights_text_and_tokenizer_of_the_file(file: Path, dtype: str) -> None:
    model, tokenizer = gguf.read(file, getattr(torch, dtype))
    load(file, dtype)
    converted, converted_tokenizer, _ = load(file, dtype)
    assert Path(converted.name_or_path).parent == hub.cache_folder() / "gguf"
    weights = converted.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert greedy(converted, PROMPT, 24) == greedy(model, PROMPT, 24)
    assert converted.generation_config.eos_token_id == model.generation_config.eos_token_id == 261
    assert converted_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert converted_tokenizer.chat_template == tokenizer.chat_template
    assert converted_tokenizer.eos_token == tokenizer.eos_token == "<|end|>"
    text = "abcde <|turn|> é\n"
    assert converted_tokenizer(text).input_ids == tokenizer(text).input_ids
    assert converted_tokenizer.decode(converted_tokenizer(text).input_ids) == tokenizer.decode(
        tokenizer(text).input_ids
    )


def test_a_second_load_maps_the_weights_into_memory_without_a_copy(file: Path) -> None:
    load(file)
    model, _, _ = load(file)
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (start, end) = next(
        (int(low, 16), int(high, 16))
        for span, *_, path in spans
        if path.endswith("model.safetensors")
        for low, high in [span.split("-")]
    )
    assert all(start <= weight.data_ptr() < end for weight in model.parameters())


def test_copies_of_one_file_share_a_conversion_and_dtypes_do_not(file: Path, reads: list[Path]) -> None:
    load(file)
    load(Path(shutil.copy(file, file.with_name("other.gguf"))))
    assert len(reads) == 1
    load(file, "bfloat16")
    assert len(reads) == 2
    assert sorted(one.dtype for one in gguf_cache.converted()) == ["bfloat16", "float32"]


@pytest.mark.parametrize("old", [False, True])
def test_a_changed_file_of_the_same_name_and_size_is_converted_again(file: Path, old: bool) -> None:
    if old:
        aged_file(file)
    first, _, _ = load(file)
    size = file.stat().st_size
    write_gguf(file, seed=1)
    assert file.stat().st_size == size
    second, _, _ = load(file)
    assert greedy(second, PROMPT, 24) != greedy(first, PROMPT, 24)
    assert len(gguf_cache.converted()) == 2


def test_an_unchanged_file_is_hashed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged_file(file)
    monkeypatch.setattr(gguf_cache, "SETTLED", -60.0)  # its inode changed a moment ago
    load(file)
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("the file was hashed again"))
    load(file)


def test_the_digest_of_a_recently_changed_file_is_not_cached(file: Path, cache: Path) -> None:
    load(file)
    assert not (cache / "gguf" / gguf_cache.DIGESTS).exists()


def test_a_damaged_index_of_digests_costs_only_time(file: Path, cache: Path, reads: list[Path]) -> None:
    load(file)
    (cache / "gguf" / gguf_cache.DIGESTS).write_text("[1]")
    load(file)
    assert reads == [file]


def test_a_truncated_copy_is_converted_again(file: Path, reads: list[Path]) -> None:
    load(file)
    (one,) = gguf_cache.converted()
    weights = one.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    load(file)
    assert len(reads) == 2


def test_a_copy_with_damaged_weights_is_removed_and_the_next_load_works(file: Path) -> None:
    load(file)
    (weights,) = (one.folder / "model.safetensors" for one in gguf_cache.converted())
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(OSError, match="its converted copy was removed: try again"):
        load(file)
    assert names() == []
    load(file)
    assert names() == [file.name]


def test_other_files_in_the_folder_of_a_gguf_file_are_ignored(file: Path) -> None:
    clean = load(file)[1]
    gguf_cache.clear()
    marker = file.with_name("marker")
    file.with_name("tokenizer_config.json").write_text(
        json.dumps({"chat_template": "other", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}})
    )
    file.with_name("mine.py").write_text(f"open({str(marker)!r}, 'w')")
    assert load(file)[1].chat_template == clean.chat_template
    assert not marker.exists()


def test_weights_that_overflow_float16_raise_an_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "large.gguf", quantization="BF16", scale=1e5)
    with pytest.raises(
        ValueError, match=r"dtype: float16 cannot hold all weights of .*; give bfloat16 or float32"
    ):
        load(file, "float16")
    assert names() == []
    assert all(bool(weight.isfinite().all()) for weight in load(file, "bfloat16")[0].parameters())


# Disk space


def converted_size(file: Path) -> int:
    load(file)
    (one,) = gguf_cache.converted()
    return one.bytes


def set_limit(patch: pytest.MonkeyPatch, size: float) -> None:
    patch.setenv(gguf_cache.LIMIT_VARIABLE, repr(size / 2**30))


def set_last_use(name: str, seconds: float) -> None:
    (one,) = (one for one in gguf_cache.converted() if one.name == name)
    os.utime(one.folder / gguf_cache.USED, (one.used - seconds, one.used - seconds))


def test_the_least_recently_used_model_is_removed_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second, third = (write_gguf(file.with_name(f"{name}.gguf"), i) for i, name in enumerate("bc", 1))
    size = converted_size(file)
    set_limit(monkeypatch, 2.5 * size)
    load(second)
    set_last_use(file.name, 100)
    set_last_use(second.name, 200)
    assert names() == [file.name, second.name]
    load(third)
    assert names() == [third.name, file.name]
    load(file)
    assert names() == [file.name, third.name]


def test_a_model_in_use_is_not_removed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second, third = (write_gguf(file.with_name(f"{name}.gguf"), i) for i, name in enumerate("bc", 1))
    size = converted_size(file)
    set_limit(monkeypatch, 2.5 * size)
    load(second)
    set_last_use(file.name, 100)
    model, _, _ = load(file)
    set_last_use(file.name, 300)
    load(third)
    assert names() == [third.name, file.name]
    assert [one.in_use for one in gguf_cache.converted()] == [False, True]
    assert gguf_cache.clear([file.name])[0] == []
    del model
    assert [one.name for one in gguf_cache.clear()[0]] == [third.name, file.name]


def test_a_model_in_use_by_another_process_is_not_removed(file: Path) -> None:
    load(file)
    (one,) = gguf_cache.converted()
    code = "import sys; from outpace.models import gguf_cache; from pathlib import Path; "
    code += "held = gguf_cache.hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(one.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        removed, in_use = gguf_cache.clear()
        assert (removed, [held.name for held in in_use]) == ([], [file.name])
        process.communicate("")
    assert [gone.name for gone in gguf_cache.clear()[0]] == [file.name]


def test_a_file_too_large_for_the_limit_is_loaded_directly_and_removes_nothing(
    file: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_gguf(file.with_name("b.gguf"), 1)
    size = converted_size(other)
    set_limit(monkeypatch, 0.5 * size)
    model, _, lines = load(file)
    assert len(lines) == 2
    assert lines[0].startswith(f"{file}: converted at every start, as it cannot be kept in ")
    assert f"({gguf_cache.LIMIT_VARIABLE} allows" in lines[0]
    assert greedy(model, PROMPT, 4)
    load(file)
    assert reads == [other, file, file]
    assert names() == [other.name]


def test_on_a_full_disk_one_message_is_printed_and_the_model_is_loaded_directly(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 1))
    model, _, lines = load(file)
    assert f"cannot be kept in {cache / 'gguf'} (the disk has 0.0 GiB free" in lines[0]
    assert greedy(model, PROMPT, 4)


def test_a_disk_that_fills_up_during_conversion_leaves_no_files(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full(self: Any, folder: Path, **options: Any) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    model, _, lines = load(file)
    assert "(I/O error: No space left on device (os error 28))" in lines[1]
    assert greedy(model, PROMPT, 4)
    assert [one for one in (cache / "gguf").iterdir() if one.is_dir()] == []


def test_a_cache_that_cannot_be_written_gives_one_message(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "text" / "cache"))
    model, _, lines = load(file)
    assert lines[0].endswith("(Not a directory)")
    assert lines[1:] == [f"{file}: float32 on cpu"]
    assert greedy(model, PROMPT, 4)


@pytest.mark.parametrize("wrong", ["many", "-1", "nan", "inf"])
def test_a_limit_that_is_not_a_number_raises_an_error(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(gguf_cache.LIMIT_VARIABLE, wrong)
    with pytest.raises(
        ValueError, match=f"{gguf_cache.LIMIT_VARIABLE}: got '{wrong}'; it must be a number of GiB"
    ):
        gguf_cache.limit()


def test_files_of_a_killed_process_are_removed_by_the_next_conversion(file: Path, cache: Path) -> None:
    left = cache / "gguf" / "0123456789abcdef.tmpkilled"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    load(file)
    assert not left.exists()


def test_several_threads_load_a_file_at_once_and_convert_it_once(file: Path, reads: list[Path]) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(load(file)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert names() == [file.name]
    texts = [greedy(model, PROMPT, 8) for model in [*found, load(file)[0]]]
    assert len(texts) == 4
    assert all(text == texts[0] for text in texts)


def test_a_load_waits_for_the_conversion_of_another_process(file: Path, reads: list[Path]) -> None:
    from outpace.models.store import locked

    lines: list[str] = []
    folder = gguf_cache._folder_of(file, "float32")
    with locked(gguf_cache._lock(folder), "", lines.append):
        thread = threading.Thread(target=lambda: lines.extend(load(file)[2]))
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        assert reads == []
    thread.join()
    assert lines[0] == f"Another process is converting {file.name}; waiting for it."
    assert reads == [file]


# Damaged files


def test_a_truncated_file_is_refused_before_it_is_read(file: Path, reads: list[Path]) -> None:
    whole = file.read_bytes()
    for end in [6, 20, 100, 5000, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:end])
        with pytest.raises(OSError, match="cannot be loaded, as it is damaged or cut off"):
            load(file)
    assert reads == []


def test_weights_are_counted_by_the_header(file: Path) -> None:
    assert gguf.count_weights(file) == sum(weight.numel() for weight in load(file)[0].parameters())


# Progress


def convert_command(file: Path) -> list[str]:
    code = "import sys; from outpace.models import hub; hub.load_model(sys.argv[1], device='cpu')"
    return [sys.executable, "-c", code, str(file)]


@pytest.mark.full
def test_progress_is_one_line_if_stderr_is_not_a_terminal(file: Path) -> None:
    done = subprocess.run(convert_command(file), capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith(f"{file}: converting it once to safetensors, ")
    assert second == f"{file}: float32 on cpu"


@pytest.mark.full
def test_progress_is_one_bar_on_a_terminal(file: Path) -> None:
    parent_end, child_end = pty.openpty()
    termios.tcsetwinsize(child_end, (24, 100))
    with subprocess.Popen(convert_command(file), stderr=child_end, stdout=child_end, text=True) as process:
        os.close(child_end)
        output = io.BytesIO()
        try:
            while part := os.read(parent_end, 4096):
                output.write(part)
        except OSError:  # its other end is closed
            pass
        os.close(parent_end)
        assert process.wait() == 0
    bars = {
        part.split(":")[0]
        for part in output.getvalue().decode().replace("\n", "\r").split("\r")
        if "%|" in part
    }
    assert bars == {"Converting and de-quantizing GGUF tensors..."}


# Decoding


def test_a_gguf_file_decodes_and_drafts(file: Path) -> None:
    decoder = outpace.load(
        file, file, device="cpu", dtype="float32", num_draft_tokens=3, tell=lambda line: None
    )
    out = decoder.generate(PROMPT, max_new_tokens=12, temperature=0)
    assert out.token_ids == greedy(load(file)[0], PROMPT, 12)[: len(out.token_ids)]
    assert out.stats.tokens_per_pass > 2
