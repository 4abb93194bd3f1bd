"""`outpace bench sweep`: tables, a file, a plot, and the results so far if it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.bench import results, synthetic
from tests.bench.test_synthetic import DRAFT, TARGET
from tests.cli.conftest import Run, full_disk, interrupted
from tests.cli.test_tables import heads
from tests.tiny import byte_tokenizer, tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("small", 1)):
        tiny(vocab_size=272, seed=seed, max_position_embeddings=512).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def common(models: Path) -> list[str]:
    return ["--target", str(models / "target"), "--dtype", "float32", "--device", "cpu", "-m", "16"]


def test_every_cell_is_in_the_tables_the_file_and_the_plot(run: Run, models: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    flags = [
        "--draft",
        str(models / "small"),
        "--draft",
        "lookup",
        "--temperature",
        "0",
        "--temperature",
        "1",
    ]
    flags += ["--top-k", "9", "--num-draft-tokens", "03", "--num-draft-tokens", "auto"]
    flags += ["--prompt", "ab ab ab ab", "--prompt", "cd", "--batch", "2"]
    code, shown, errors = run(
        "bench sweep", *common(models), *flags, "--out", str(out), "--plot", str(picture)
    )
    assert code == 0, errors
    found = results.load(out, ("sweep",))
    assert found["complete"] is True
    assert (found["rounds"], found["of"]) == (1, 1)
    assert (found["target"], found["prompts"], found["batch"]) == ("target", 2, 2)
    assert found["command"].startswith("outpace bench sweep --target target")
    names = [(one["draft"], one["temperature"], one["num_draft_tokens"]) for one in found["figures"]]
    assert sorted(names) == sorted(
        (draft, temperature, num_draft_tokens)
        for draft in ("small", "lookup")
        for temperature in (0.0, 1.0)
        for num_draft_tokens in ("0", "3", "auto")
    )
    for one in found["figures"]:
        assert one["texts"] == 2
        assert one["p50_ms"] <= one["p90_ms"] <= one["p99_ms"]
        assert one["top_k"] == 9
        assert (one["predicted"] is not None) == (one["num_draft_tokens"] == "3")
        assert one["interval"] is None  # a single group has none
        if one["num_draft_tokens"] == "0":
            assert (one["speedup"], one["tokens_per_pass"]) == (1.0, 1.0)
    assert "small, temperature 0, top-k 9: ms of 128 tokens, 2 texts" in shown
    assert {"P99", "loop ms", "tokens per pass", "α counted", "speedup", "thm 3.8"} <= heads(shown)
    assert found["date"].startswith("20")
    assert found["data"] == {"name": "--prompt", "rows": 2, "left_out": 0}
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "small, temperature 1, top-k 9, auto" in picture.read_text()


def test_texts_are_sampled_with_the_sampling_flags(run: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    flags = ["--draft", "random", "--num-draft-tokens", "1", "--prompt", "ab ab", "--out", str(out)]
    drawn = ["--temperature", "1", "--min-p", "0.1", "--presence-penalty", "0.5", "--logit-bias", "97=-inf"]
    code, shown, errors = run("bench sweep", *common(models), *flags, *drawn)
    assert code == 0, errors
    assert "1 text" in shown
    assert "1 texts" not in shown
    found = results.load(out)["settings"]["sampling"]
    assert (found["min_p"], found["presence_penalty"], found["logit_bias"]) == (0.1, 0.5, {"97": "-inf"})


def test_a_synthetic_pair_is_measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.PAIRS, "tiny/er", (TARGET, DRAFT))
    out = tmp_path / "sweep.json"
    flags = [
        "--alpha",
        "0.7",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--temperature",
        "1",
        "--context",
        "9",
    ]
    code, _, errors = run(
        "bench sweep",
        "--pair",
        "tiny/er",
        *flags,
        "--num-draft-tokens",
        "2",
        "--limit",
        "3",
        "-m",
        "100",
        "--out",
        str(out),
    )
    assert code == 0, errors
    found = json.loads(out.read_text())
    assert (found["target"], found["prompts"], found["settings"]["alpha"]) == ("tiny/er", 3, 0.7)
    baseline, two = found["figures"]
    assert (baseline["draft"], two["draft"]) == ("er", "er")
    # About 130 steps, a standard error of 0.03
    assert two["alpha"] == pytest.approx(0.7, abs=0.12)
    assert two["interval"][0] < two["interval"][1]


@pytest.mark.full
def test_ctrl_c_saves_the_results_of_complete_rounds(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    flags = [
        "--num-draft-tokens",
        "2",
        "--prompt",
        "ab ab",
        "--prompt",
        "cd",
        "--repeats",
        "100000",
        "--out",
        str(out),
    ]
    code, shown, errors = interrupted(
        ["bench", "sweep", *common(models), *flags],
        lambda: out.exists() and json.loads(out.read_text())["rounds"] >= 3,
    )
    assert code == 130, errors
    found = results.load(out, ("sweep",))
    assert found["complete"] is False
    assert found["rounds"] >= 3
    assert [one["texts"] for one in found["figures"]] == [found["rounds"]] * 2
    assert "ms of 128 tokens" in shown
    last = errors.splitlines()[-1]
    said = f"interrupted after {found['rounds']} of 200000 rounds: these are their results, also in {out}"
    assert last == said
    assert not [one for one in tmp_path.iterdir() if one != out]


@pytest.mark.parametrize("timed", [False, True])
def test_ctrl_c_before_the_first_round_saves_the_times_of_parts_if_they_are_measured(
    run: Run, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: bool
) -> None:
    from outpace.bench import cost
    from outpace.bench.sweep import Sweep

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    if timed:
        monkeypatch.setattr(Sweep, "warm_up", interrupted)
    else:
        monkeypatch.setattr(cost, "curve", interrupted)
    out = tmp_path / "sweep.json"
    code, shown, errors = run("bench sweep", *common(models), "--num-draft-tokens", "2", "--out", str(out))
    assert (code, shown) == (130, "")
    saved = f"times of parts are in {out}" if timed else "nothing was saved"
    assert errors.splitlines()[-1] == f"interrupted after 0 of 12 rounds: {saved}"
    assert out.exists() == timed
    if timed:
        found = results.load(out, ("sweep",))
        assert (found["complete"], found["rounds"], found["figures"]) == (False, 0, [])
        assert [one["draft"] for one in found["parts"]] == ["lookup"]


def test_progress_without_a_terminal_is_one_line_per_part_and_round(
    run: Run, models: Path, tmp_path: Path
) -> None:
    flags = [
        "--num-draft-tokens",
        "2",
        "--prompt",
        "ab",
        "--prompt",
        "cd",
        "--out",
        str(tmp_path / "sweep.json"),
    ]
    code, _, errors = run("bench sweep", *common(models), *flags)
    assert code == 0
    parts = [line.partition(":")[0] for line in errors.splitlines()]
    assert parts[-5:-1] == ["timing parts", "warming up", "round 1 of 2", "round 2 of 2"]


def test_note_does_not_name_a_file_that_could_not_be_written(
    run: Run, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=2)
    out = tmp_path / "sweep.json"
    flags = ["--num-draft-tokens", "2", "--prompt", "ab", "--prompt", "cd", "--out", str(out)]
    code, shown, errors = run("bench sweep", *common(models), *flags)
    assert code == 2
    assert "ms of 128 tokens" in shown
    said = [
        "failed after 2 of 2 rounds: these are their results",
        f"outpace: {out}: it cannot be written (No space left on device)",
    ]
    assert errors.splitlines()[-2:] == said


def test_error_says_that_texts_ended_before_anything_was_timed(run: Run, tmp_path: Path) -> None:
    model = tiny(vocab_size=272)
    model.generation_config.eos_token_id = list(range(272))
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    flags = [
        *common(tmp_path),
        "--num-draft-tokens",
        "1",
        "--prompt",
        "ab",
        "--out",
        str(tmp_path / "sweep.json"),
    ]
    code, _, errors = run("bench sweep", *flags)
    assert code == 2
    assert errors.splitlines()[-1].endswith(
        "all texts ended before anything could be timed; try --ignore-eos"
    )
    assert run("bench sweep", *flags, "--ignore-eos")[0] == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--num-draft-tokens", "far"],
            "--num-draft-tokens: got 'far'; it must be a number, auto, heuristic",
        ),
        (["--num-draft-tokens", "-1"], "num-draft-tokens: got '-1'"),
        (["--num-draft-tokens", "8"], "num_draft_tokens: got 8 for texts of 16 tokens"),
        (
            ["--num-draft-tokens", "2", "--num-draft-tokens", "12", "--num-draft-tokens", "8"],
            "or at least 27 tokens (--max-new-tokens 27)",
        ),
        (
            ["--num-draft-tokens", "600", "-m", "2000"],
            "num_draft_tokens: got Fixed(600), up to 600",
        ),
        (["--pair", "gpt5/gpt4"], "--target: given together with --pair"),
        (["--alpha", "0.5"], "--alpha: it needs --pair, a synthetic pair of models"),
        (["--context", "9"], "--context: it needs --pair, a synthetic pair of models"),
        (["--draft", "none"], "--draft: none is the baseline"),
        (["--draft", "/nowhere/model"], "/nowhere/model: no such file or folder"),
        (["--draft", "/a/model", "--draft", "/b/model"], "--draft: two have the same name"),
        (["--prompt", "a", "--data", "b"], "--prompt: given together with --data"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "2"], "--top-p: got 2.0"),
        (["--rule", "coin"], "rule: got 'coin'"),
        (["--batch", "0"], "--batch"),
        (["--plot", "/nowhere/at/all.svg"], "--plot: /nowhere/at: no such folder"),
        (["--out", "s.svg", "--plot", "./s.svg"], "--plot: s.svg is the file of --out, too; name another"),
        (["--out", "/tmp"], "--out: /tmp is a folder"),
        (["--out", "/proc/x.json"], "--out: /proc/x.json: it cannot be written ("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_one_line_of_error(
    run: Run, models: Path, tmp_path: Path, words: list[str], why: str
) -> None:
    num_draft_tokens = [] if "--num-draft-tokens" in words else ["--num-draft-tokens", "1"]
    out = [] if "--out" in words else ["--out", str(tmp_path / "sweep.json")]
    code, shown, errors = run("bench sweep", *common(models), *num_draft_tokens, *out, *words)
    assert (code, shown) == (2, "")
    assert why in errors.splitlines()[-1]
    assert not (tmp_path / "sweep.json").exists()


def test_an_unknown_pair_is_one_line_of_error(run: Run) -> None:
    code, _, errors = run("bench sweep", "--pair", "gpt5/gpt4")
    assert code == 2
    assert errors.startswith("outpace: --pair: got 'gpt5/gpt4'; there are llama2-7b/1.3b")


def test_prompts_longer_than_the_context_are_left_out(run: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    flags = [*common(models), "--num-draft-tokens", "1", "--out", str(out), "--prompt", "a" * 600]
    code, _, errors = run("bench sweep", *flags)
    assert code == 2
    assert "prompts: not one of them fits a context of 512 tokens" in errors.splitlines()[-1]
    assert run("bench sweep", *flags, "--prompt", "ab")[0] == 0
    assert json.loads(out.read_text())["prompts"] == 1


def test_a_file_without_prompts_is_one_line_of_error(run: Run, models: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"nothing": 1}\n')
    out = str(tmp_path / "sweep.json")
    code, _, errors = run(
        "bench sweep", *common(models), "--num-draft-tokens", "1", "--data", str(rows), "--out", out
    )
    assert code == 2
    assert "rows.jsonl has no row that can be used" in errors.splitlines()[-1]
