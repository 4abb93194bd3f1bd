"""`outpace doctor` lists converted GGUF files and removes them."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from outpace.models import default, gguf_cache, hub
from tests.cli.conftest import Run
from tests.gguf_file import write_gguf

doctor = importlib.import_module("outpace.cli.doctor")  # the package has a function of this name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(gguf_cache.LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(doctor, "bandwidth", lambda device: 1.0)
    return tmp_path / "cache"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return two converted files; the first was used more recently."""
    written = [write_gguf(tmp_path / f"{name}.gguf", seed) for seed, name in enumerate("ab")]
    for file in written:
        hub.load_model(file, device="cpu", dtype="float32", tell=lambda line: None)
    (older,) = (one for one in gguf_cache.converted() if one.name == "b.gguf")
    os.utime(older.folder / gguf_cache.USED, (0, 0))
    return written


def test_converted_files_are_listed_with_size_and_last_use(run: Run, files: list[Path]) -> None:
    _, out, _ = run("doctor", "--json")
    first, second = json.loads(out)["converted GGUF"]
    assert (first["name"], second["name"]) == ("a.gguf", "b.gguf")
    assert first["bytes"] > 100_000
    assert second["last_used"].startswith(("1970-01-01", "1969-12-31"))
    assert not first["in_use"]
    shown = " ".join(run("doctor")[1].split())
    assert "converted GGUF a.gguf in float32, 0 MiB, last used " in shown
    assert "default model not fetched yet" in shown
    assert "converted GGUF files up to 20 GiB" in shown


def test_an_empty_cache_is_reported_as_none(run: Run) -> None:
    assert json.loads(run("doctor", "--json")[1])["converted GGUF"] == []
    assert "converted GGUF none" in " ".join(run("doctor")[1].split())
    assert json.loads(run("doctor", "--clear-cache", "--json")[1]) == {
        "removed": [],
        "in_use": [],
        "freed_bytes": 0,
    }


def test_clear_cache_removes_only_converted_files_and_reports_freed_bytes(
    run: Run, files: list[Path], cache: Path
) -> None:
    (cache / default.DEFAULT).mkdir()
    size = sum(one.bytes for one in gguf_cache.converted())
    code, out, _ = run("doctor", "--clear-cache", "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["name"] for one in found["removed"]] == ["a.gguf", "b.gguf"]
    assert found["freed_bytes"] == size
    assert gguf_cache.converted() == []
    assert (cache / default.DEFAULT).is_dir()
    assert all(file.exists() for file in files)


def test_clear_cache_with_names_removes_only_these_files(run: Run, files: list[Path]) -> None:
    _, out, _ = run("doctor", "--clear-cache", "b.gguf")
    assert "removed b.gguf in float32" in " ".join(out.split())
    assert [one.name for one in gguf_cache.converted()] == ["a.gguf"]
    code, _, errors = run("doctor", "--clear-cache", "b.gguf")
    assert (code, errors.splitlines()[-1]) == (
        2,
        "outpace: b.gguf: no converted GGUF file has this name; there is a.gguf",
    )


def test_clear_cache_leaves_a_file_in_use_and_names_it(run: Run, files: list[Path]) -> None:
    model, _ = hub.load_model(files[0], device="cpu", dtype="float32", tell=lambda line: None)
    found = json.loads(run("doctor", "--clear-cache", "--json")[1])
    assert [one["name"] for one in found["removed"]] == ["b.gguf"]
    assert [one["name"] for one in found["in_use"]] == ["a.gguf"]
    assert model.get_input_embeddings().weight.isfinite().all()


def test_names_without_clear_cache_are_refused(run: Run, files: list[Path]) -> None:
    code, _, errors = run("doctor", "a.gguf")
    assert (code, errors.splitlines()[-1]) == (
        2,
        "outpace: a.gguf: doctor takes names with --clear-cache only",
    )
    assert len(gguf_cache.converted()) == 2


def test_sizes_are_shown_in_mib_or_gib() -> None:
    assert doctor._size(3 << 20) == "3 MiB"
    assert doctor._size(5 << 29) == "2.5 GiB"
