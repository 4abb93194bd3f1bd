"""`outpace bench alpha`: its tables, its file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.bench import alpha, blocks
from outpace.bench.results import load
from outpace.cli import drafts
from outpace.cli.show import KINDS
from tests.cli.conftest import Run, full_disk, interrupted, saved

SMALL = ["--dtype", "float32", "--device", "cpu", "-m", "12", "--context", "8"]
SIZES = ["--pass", "1", "--pass", "3", "--batch", "1", "--batch", "2", "--num-draft-tokens", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder for files that no flag names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"ab {i} ab", "category": "ab" if i % 2 else "other"} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_draft_and_lenience_is_in_the_table_and_in_the_file(
    run: Run, model: str, other: str, data: str, tmp_path: Path
) -> None:
    ngram, out = tmp_path / "counts.safetensors", tmp_path / "alpha.json"
    outpace.NGramDrafter.fit([5, 6, 7, 5, 6, 8], n=2, vocab_size=272).save(ngram)
    drafts = ["-d", other, "-d", model, "-d", f"ngram:{ngram}", "-d", "lookup", "-d", "random"]
    flags = ["--target", model, "--data", data, "--temperature", "1", "--lenience", "1", "--lenience", "0.5"]
    status, table, errors = run("bench alpha", *flags, *drafts, *SMALL, *SIZES, "-o", str(out))
    assert status == 0, errors
    found = load(out, ("alpha",))
    assert found["complete"]
    assert (found["prompts"], found["new_tokens"], found["sampling"]["temperature"]) == (6, 72, 1)
    assert found["command"].startswith("outpace bench alpha")
    names = [Path(other).name, Path(model).name, f"ngram:{ngram.name}", "lookup", "random"]
    assert [(one["draft"], one["lenience"]) for one in found["drafts"]] == [
        (name, lenience) for name in names for lenience in (1.0, 0.5)
    ]
    assert all(name in table for name in names)
    entries = {(one["draft"], one["lenience"]): one for one in found["drafts"]}
    for one in found["drafts"]:
        check(one, counted=one["lenience"] == 1)
    assert entries[names[0], 0.5]["alpha"] > entries[names[0], 1.0]["alpha"]
    itself = entries[names[1], 1.0]
    assert itself["alpha"] == pytest.approx(1, abs=1e-4)
    assert (itself["counted"], itself["by_position"]) == (1, [1, 1])
    assert all(low < high == 1 for low, high in itself["by_position_intervals"])
    assert entries["lookup", 1.0]["coverage"] < 1 == entries["random", 1.0]["coverage"]
    assert {(one["B"], one["n"]) for one in found["passes"]} == {(1, 1), (1, 3), (2, 1), (2, 3)}
    assert {(one["B"], one["g"], one["sampled"]) for one in found["verify"]} == {
        (B, g, sampled) for B in (1, 2) for g in (0, 1, 2) for sampled in (True, False)
    }
    assert found["trace"]["draft"] == names[0]
    assert {kind for _, kind in found["trace"]["pieces"]} <= set(KINDS)
    assert sum(one["num_draft_tokens"] for one in found["trace"]["iterations"]) > 0


def test_help_names_the_command(run: Run) -> None:
    status, out, _ = run("bench alpha", "--help")
    assert status == 0
    assert "Usage: outpace bench alpha" in out


def check(one: dict[str, Any], counted: bool) -> None:
    """Check what holds for every entry."""
    assert 0 <= one["interval"][0] <= one["alpha"] <= one["interval"][1] <= 1
    assert set(one["by_domain"]) == {"ab", "other"}
    domains = one["by_domain"].values()
    assert sum(each["draft_tokens"] for each in domains) == one["draft_tokens"]
    whole = sum(each["draft_tokens"] * (each["alpha"] or 0) for each in domains)
    assert whole / one["draft_tokens"] == pytest.approx(one["alpha"])
    assert one["coverage"] == pytest.approx(one["draft_tokens"] / 72)
    assert len(one["autocorrelation"]) == 5
    assert one["step_ms"] > 0
    assert one["predicted"] >= 1
    assert (one["predicted"] > 1) == (one["best_g"] > 0)
    assert [at["B"] for at in one["by_batch"]] == [1, 2]
    for at in one["by_batch"]:
        low, high = at["predicted_interval"]
        assert low <= at["predicted"] <= high or at["best_g"] == 0
    if one["lenience"] == 1:
        assert one["divergence"] == pytest.approx(1 - one["alpha"])
    if not counted:
        assert one["counted"] is None
        return
    assert 0 <= one["counted"] <= 1
    for shares in one["blocks"].values():
        assert sum(shares) == pytest.approx(1)
    accepted = sum(k * share for k, share in enumerate(one["blocks"]["observed"]))
    assert one["tokens_per_pass"][0] == pytest.approx(1 + accepted)


def test_too_wide_an_interval_exits_with_1_and_says_how_many_prompts_are_needed(
    run: Run, model: str, other: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "alpha.json"
    flags = ["--target", model, "-d", other, "--data", data, "--temperature", "1", "--lenience", "1"]
    status, table, errors = run(
        "bench alpha", *flags, *SMALL, *SIZES, "--within", "0.001", "--limit", "3", "-o", str(out)
    )
    assert status == 1
    (line,) = [one for one in errors.splitlines() if "α is known to" in one]
    (one,) = load(out)["drafts"]
    half = (one["interval"][1] - one["interval"][0]) / 2
    assert f"±{half:.3f}, not to ±0.001: 3 prompts are too few, about " in line
    assert int(line.split("about ")[1].split()[0]) == pytest.approx(3 * (half / 0.001) ** 2, rel=0.01)
    assert load(out)["complete"]
    assert "α" in table
    status, _, errors = run("bench alpha", *flags, *SMALL, *SIZES, "--within", "0.9")
    assert status == 0
    assert "too few" not in errors


def test_note_says_that_a_single_prompt_has_no_interval(
    run: Run, model: str, other: str, folder: Path
) -> None:
    flags = ["--target", model, "-d", other, "--prompt", "ab ab", "--lenience", "1", *SMALL, *SIZES]
    status, table, errors = run("bench alpha", *flags)
    assert status == 0
    assert "α of a single prompt has no interval; give at least 2" in errors
    assert "results in alpha.json" in errors
    assert load(folder / "alpha.json")["complete"]
    assert f"{Path(other).name}: B = 1: " in table
    status, _, errors = run("bench alpha", *flags, "--within", "0.1")
    assert status == 1
    assert (
        f"{Path(other).name}: it drafted in one prompt of 1, and α of a single one has no interval" in errors
    )


def test_two_drafts_with_the_same_folder_name_are_both_measured(run: Run, model: str, tmp_path: Path) -> None:
    flags = ["--target", model, "--prompt", "ab", "--lenience", "1", *SMALL, *SIZES]
    folders = [tmp_path / one / "draft" for one in ("a", "b")]
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        saved(folder, seed)
    out = tmp_path / "alpha.json"
    assert run("bench alpha", *flags, "-d", str(folders[0]), "-d", str(folders[1]), "-o", str(out))[0] == 0
    found = {one["draft"]: one["alpha"] for one in load(out)["drafts"]}
    assert list(found) == ["draft", str(folders[1])]
    assert found["draft"] == 1 > found[str(folders[1])]  # greedy, and the draft is the target


def test_prompts_longer_than_the_context_are_left_out_with_a_note(run: Run, model: str) -> None:
    """The tiny models' context is 128."""
    flags = ["--target", model, "--lenience", "1", *SMALL, *SIZES, "--prompt", "a " * 200]
    status, table, errors = run("bench alpha", *flags, "--prompt", "ab", "--prompt", "ba")
    assert status == 0
    assert "1 of 3 prompts do not fit a context of 128: left out" in errors
    assert "2 prompts, 24 tokens" in table
    status, _, errors = run("bench alpha", *flags)
    assert (status, errors.splitlines()[-1]) == (
        2,
        "outpace: prompts: not one of them fits a context of 128 tokens",
    )


@pytest.mark.full
def test_an_interruption_leaves_a_file_and_tables_of_the_results_so_far(
    model: str, other: str, tmp_path: Path
) -> None:
    out, prompts = tmp_path / "alpha.json", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"ab {i}"}) + "\n" for i in range(4000)))
    words = ["bench", "alpha", "--target", model, "-d", other, "--data", str(prompts), *SMALL, "-o", str(out)]
    status, table, errors = interrupted(words, out.exists)
    assert status == 130, errors
    found = load(out, ("alpha",))
    assert found["complete"] is False
    assert 4 <= found["prompts"] < 4000
    assert [one["lenience"] for one in found["drafts"]] == [1.0, 0.5, 0.3, 0.1]
    assert all(one["alpha"] is not None and one["best_g"] is None for one in found["drafts"])
    assert f"{found['prompts']} prompts" in table
    assert f"stopped early: these are the results so far, also in {out}" in errors
    assert [one for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_an_interruption_before_any_result_says_that_nothing_was_saved(
    run: Run, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.bench.alpha.measure", stop)
    status, table, errors = run("bench alpha", "--target", model, *SMALL, *SIZES)
    assert (status, table) == (130, "")
    assert "stopped early: nothing was measured yet, and nothing was saved" in errors
    assert not list(folder.iterdir())


def test_note_does_not_name_a_file_that_could_not_be_written(
    run: Run, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=1)
    status, table, errors = run("bench alpha", "--target", model, "--prompt", "ab", *SMALL, *SIZES)
    assert status == 2
    assert "1 prompt, 12 tokens of the target" in table
    assert errors.splitlines()[-2:] == [
        "stopped early: these are the results so far",
        "outpace: alpha.json: it cannot be written (No space left on device)",
    ]


def test_progress_without_a_terminal_is_one_line_per_part(run: Run, model: str) -> None:
    status, _, errors = run("bench alpha", "--target", model, "--limit", "5", *SMALL, *SIZES)
    assert status == 0
    lines = errors.splitlines()
    at = lines.index("α of 0 of 5 prompts")
    assert lines[at : at + 7] == [
        "α of 0 of 5 prompts",
        "α of 4 of 5 prompts",
        "runs with g = 2: lookup",
        "passes of the target",
        "verification",
        "steps of a draft: lookup",
        lines[at + 6],
    ]
    assert lines[at + 6].startswith("a trace with g = ")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["-d", "none"], "--draft: none drafts nothing"),
        (["-d", "ngram:/nowhere"], "/nowhere: no such file"),
        (["-d", "/nowhere/model"], "/nowhere/model: no such file or folder"),
        (["--target", "/nowhere/model"], "/nowhere/model: no such file or folder"),
        (["--lenience", "0"], "--lenience: got 0.0; it must be a number in (0, 1]"),
        (["--lenience", "1.5"], "--lenience: got 1.5"),
        (["--within", "0"], "--within: got 0; it must lie between 0 and 1"),
        (["--within", "nan"], "--within: got nan"),
        (["--confidence", "1"], "--confidence: got 1; it must lie between 0 and 1"),
        (["--confidence", "95"], "--confidence: got 95"),
        (["--prompt", "a", "--data", "b"], "--prompt: given together with --data"),
        (["--prompt", " "], "--prompt: it is empty"),
        (["--data", "nowhere.jsonl"], "data: nowhere.jsonl: no such file"),
        (["--temperature", "-1"], "temperature: got -1.0"),
        (["--limit", "0"], "--limit"),
        (["--every", "0"], "--every"),
        (["--batch", "0"], "--batch"),
        (["--pass", "0"], "--pass"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens"),
        (["--num-draft-tokens", "500"], "num_draft_tokens: got Fixed(500), up to 500"),
        (
            ["--context", "127"],
            "context: got 127; with 17 tokens more it must fit the model's",
        ),
        (["-m", "0"], "--max-new-tokens"),
        (["--device", "meta"], "device: meta holds no weights"),
        (["-o", "/proc/x.json"], "--out: /proc/x.json: it cannot be written ("),
        (["-o", "/dev/null"], "--out: /dev/null: it may not be written"),
        (["--dtype", "int3"], "dtype: got 'int3'"),
        (["--nonsense"], "--nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_one_line_of_error_and_writes_no_file(
    run: Run, model: str, tmp_path: Path, flags: list[str], why: str
) -> None:
    out = tmp_path / "alpha.json"
    words = [] if "--target" in flags else ["--target", model]
    words += ["--dtype", "float32", "--device", "cpu", "-o", str(out)]
    status, table, errors = run("bench alpha", *words, *flags)
    assert (status, table) == (2, "")
    assert why in errors.splitlines()[-1]
    assert len([line for line in errors.splitlines() if line.startswith("outpace: ")]) == 1
    assert not out.exists()


def test_trace_skips_a_first_prompt_that_failed(
    run: Run, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_texts, trace = alpha.target_texts, blocks.trace
    seen: list[Any] = []

    def but_the_first(target: Any, prompts: Any, *more: Any) -> Any:
        seen.extend(prompts)
        return target_texts(target, prompts, *more)[1:]

    def second(decoder: Any, prompt: Any, *more: Any, **options: Any) -> Any:
        assert prompt == seen[1] != seen[0]
        return trace(decoder, prompt, *more, **options)

    monkeypatch.setattr(alpha, "target_texts", but_the_first)
    monkeypatch.setattr(blocks, "trace", second)
    words = ["--prompt", "abc", "--prompt", "de", "--prompt", "fg", *SMALL, *SIZES]
    status, _, errors = run("bench alpha", "--target", model, *words)
    assert status == 0, errors
    assert load(folder / "alpha.json")["complete"]


@pytest.mark.parametrize("command", ["bench alpha", "bench sweep", "generate"])
def test_ngram_without_a_file_is_refused(run: Run, model: str, command: str) -> None:
    words = ["ab"] if command == "generate" else []
    status, _, errors = run(command, *words, "--target", model, "-d", "ngram")
    assert status == 2
    assert errors.splitlines()[-1].startswith("outpace: draft: ngram needs a file, ngram:FILE")


def test_a_missing_draft_is_refused_before_the_target_is_loaded(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str, **options: Any) -> None:
        raise OSError(f"{name}: cannot be loaded")

    loaded: list[str] = []
    monkeypatch.setattr(drafts, "load_drafter", nothing)
    monkeypatch.setattr(drafts, "load_model", lambda name, **options: loaded.append(name))
    status, _, errors = run("bench alpha", "--target", model, "-d", "nobody/has-this")
    assert (status, errors.splitlines()[-1]) == (2, "outpace: nobody/has-this: cannot be loaded")
    assert not loaded
    status, _, errors = run("bench alpha", "--target", "/nowhere/model", "-d", "nobody/has-this")
    assert (status, errors.splitlines()[-1]) == (2, "outpace: /nowhere/model: no such file or folder")
