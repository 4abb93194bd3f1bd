"""`outpace tune`: what it recommends, the file it writes, and what there is when it is stopped."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from outpace.bench import results
from outpace.cli.tuned import Names
from outpace.draft.ngram import NGramDrafter
from outpace.models.hub import DEFAULT
from outpace.tune import config
from tests.cli.conftest import Run, full_disk, interrupted
from tests.tiny import byte_tokenizer, trained

WORDS = "the sea and the sky and "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It repeats some words for ever, which a lookup copies."""
    folder, tokenizer = tmp_path_factory.mktemp("target"), byte_tokenizer()
    ids = tokenizer(WORDS * 12).input_ids
    trained(ids, 272, steps=80, max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": (WORDS * 3)[i : 40 + 2 * i]} for i in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def common(target: str, data: str) -> list[str]:
    return ["--target", target, "--data", data, "--dtype", "float32", "--device", "cpu", "--temperature", "0"]


def test_it_recommends_what_is_fastest_and_others_take_its_configuration(
    run: Run, target: str, other: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "best.toml"
    begun = time.monotonic()
    words = [
        "--drafts",
        other,
        "lookup",
        "none",
        "--budget",
        "12",
        "-m",
        "32",
        "--batch",
        "2",
        "-o",
        str(out),
    ]
    code, shown, errors = run("tune", *common(target, data), *words)
    assert code == 0, errors
    assert time.monotonic() - begun < 13
    found = results.load(tmp_path / "outpace-tune.json", ("tune",))
    assert found["complete"] is True
    assert found["budget_seconds"] == 12 >= found["spent_seconds"]
    assert found["command"].startswith("outpace tune --target")
    assert found["target"] == Path(target).name
    chosen = found["chosen"]
    assert chosen in found["candidates"]
    assert set(chosen) == {
        "draft", "length", "dtype", "rule", "batch", "expected", "interval", "verified", "why",
    }  # fmt: skip
    assert (chosen["draft"], chosen["dtype"], chosen["rule"]) == ("lookup", "float32", "token")
    assert 1 < chosen["interval"][0] <= chosen["verified"] <= chosen["interval"][1]
    wrong = [one for one in found["candidates"] if one["draft"] == Path(other).name]
    assert wrong
    assert all(one["why"] for one in wrong)
    assert found["verdict"] in " ".join(shown.split())
    for said in ("expected", "verified", "prompt_lookup_num_tokens=", "vllm serve", "--speculative-config"):
        assert said in shown
    assert out.read_text() == found["config"]
    settings = config.read(out)
    assert (settings["target"], settings["draft"], settings["dtype"]) == (target, "lookup", "float32")
    assert settings["measured"]["interval"] == chosen["interval"]
    assert {one.name for one in tmp_path.iterdir()} == {"best.toml", "outpace-tune.json"}

    text, _ = generated(run, out)
    plain, errors = generated(run, out, "--draft", "none")
    assert text == plain
    assert "kept" not in errors
    page = tmp_path / "report.html"
    assert run("report", str(tmp_path / "outpace-tune.json"), "-o", str(page))[0] == 0
    assert "What was tried" in page.read_text()


def generated(run: Run, configuration: Path, *flags: str) -> tuple[str, str]:
    words = ["--config", str(configuration), "--raw", "--temperature", "0", "-m", "20"]
    code, out, errors = run("generate", WORDS, *words, *flags)
    assert code == 0, errors
    return out, errors


def test_a_table_is_kept_beside_the_configuration_that_names_it(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "outpace.toml"
    words = ["--drafts", "ngram", "--budget", "12", "-m", "32", "--batch", "1", "-o", str(out)]
    code, _, errors = run("tune", *common(target, data), *words)
    assert code == 0, errors
    assert 'draft = "ngram:outpace.ngram.safetensors"' in out.read_text()
    monkeypatch.chdir(tmp_path.parent)
    assert "accepted" in generated(run, out)[1]


def test_no_draft_that_pays_is_said_and_written_down(
    run: Run, target: str, other: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "outpace.toml"
    code, shown, errors = run(
        "tune", *common(target, data), "-d", other, "--budget", "10", "-m", "24", "-o", str(out)
    )
    assert code == 0, errors
    assert "Do not speculate: " in shown
    assert "model.generate(**inputs)  # nothing more" in shown
    assert config.read(out)["draft"] == "none"
    assert "length" not in config.read(out)
    assert "accepted" not in generated(run, out)[1]
    assert "accepted" in generated(run, out, "--draft", "lookup")[1]
    code, shown, _ = run("tune", *common(target, data), "none", "--budget", "10", "-o", str(out))
    assert code == 0
    assert "Do not speculate: no draft was named." in shown


def test_biased_texts_are_raced_too(run: Run, target: str, data: str, tmp_path: Path) -> None:
    words = ["-d", "lookup", "--budget", "8", "-m", "24", "--batch", "1", "--logit-bias", "0=-inf"]
    code, _, errors = run("tune", *common(target, data), *words, "-o", str(tmp_path / "outpace.toml"))
    assert code == 0, errors
    assert config.read(tmp_path / "outpace.toml")["measured"]["sampling"]["logit_bias"] == {"0": -math.inf}


def test_ctrl_c_keeps_what_there_was(target: str, data: str, tmp_path: Path) -> None:
    out, kept = tmp_path / "outpace.toml", tmp_path / "found.json"
    flags = ["-d", "lookup", "--budget", "2000", "-m", "48", "-o", str(out), "--results", str(kept)]
    code, shown, errors = interrupted(
        ["tune", *common(target, data), *flags],
        lambda: kept.exists() and json.loads(kept.read_text())["rounds"] >= 6,
        before="from outpace.tune import race; race.SETTLED, race.TURNS = 10**9, 10**9",
    )
    assert code == 130, errors
    found = results.load(kept, ("tune",))
    assert found["complete"] is False
    assert found["rounds"] >= 6
    assert found["chosen"]["draft"] == "lookup"
    assert "speed over plain decoding" in shown
    assert f"this is what there was, also in {kept}" in errors.splitlines()[-1]
    assert config.read(out)["draft"] == "lookup"
    assert not [one for one in tmp_path.iterdir() if one not in (out, kept)]


def test_a_full_disk_leaves_the_table_on_the_screen(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=3)  # costs, n-grams, acceptance
    out = tmp_path / "outpace.toml"
    words = ["-d", "lookup", "--budget", "20", "-m", "24", "-o", str(out)]
    code, shown, errors = run("tune", *common(target, data), *words)
    assert code == 2
    assert "speed over plain decoding" in shown
    *_, said, why = errors.splitlines()
    assert said.endswith("s: this is what there was, and no configuration was written")
    assert why == f"outpace: {tmp_path / 'outpace-tune.json'}: it cannot be written (No space left on device)"
    assert not out.exists()


def test_a_table_that_cannot_be_saved_leaves_what_was_found_on_the_screen(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(NGramDrafter, "save", full)
    out = tmp_path / "outpace.toml"
    words = ["--drafts", "ngram", "--budget", "12", "-m", "32", "--batch", "1", "-o", str(out)]
    code, shown, errors = run("tune", *common(target, data), *words)
    assert code != 0
    assert "Draft with ngram" in shown
    assert "and no configuration was written" in errors
    assert not out.exists()


def test_others_are_told_names_that_they_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "big").mkdir()
    drafts = {"small": "org/small", DEFAULT: DEFAULT, "big": "big"}
    names = Names("~/big", drafts, Path("outpace.ngram.safetensors"), "cpu")
    assert names.theirs() == names.theirs("big") == str(tmp_path / "big")
    assert names.theirs("small") == "org/small"
    assert names.theirs("lookup") == "lookup"
    assert names.theirs(DEFAULT) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert names.theirs("ngram") == f"ngram:{tmp_path / 'outpace.ngram.safetensors'}"
    assert Names(DEFAULT, {}, Path("t"), "cpu").theirs() == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("rounds", [False, True])
def test_ctrl_c_before_anything_is_sure_writes_no_configuration(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: bool
) -> None:
    from outpace.tune.tuning import Tuning

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuning, "race" if rounds else "time", interrupted)
    out = tmp_path / "outpace.toml"
    code, shown, errors = run("tune", *common(target, data), "-d", "lookup", "-m", "24", "-o", str(out))
    assert code == 130
    assert not out.exists()
    if rounds:
        said = "Whether it pays is not known: it was interrupted before whole texts were measured; lookup"
        assert said in " ".join(shown.split())
        assert errors.splitlines()[-1].endswith("and no configuration was written")
        assert results.load(tmp_path / "outpace-tune.json")["complete"] is False
    else:
        assert shown == ""
        assert errors.splitlines()[-1] == "interrupted: nothing was measured yet, and nothing is kept"
        assert not list(tmp_path.iterdir())


def test_no_time_is_no_verdict_and_leaves_the_configuration_as_it_is(
    run: Run, target: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "outpace.toml"
    out.write_text("an earlier one")
    words = ["-d", "lookup", "--budget", "0.01", "-o", str(out)]
    code, shown, errors = run("tune", *common(target, data), *words)
    assert code == 1
    assert out.read_text() == "an earlier one"
    said = " ".join(shown.split())
    assert "Whether it pays is not known: there was no time to measure whole texts in 0.01 s; about " in said
    assert "Do not speculate" not in said
    assert "model.generate" not in said
    assert errors.splitlines()[-1].endswith("of 0.01 s, and no configuration was written")
    kept = tmp_path / "outpace-tune.json"
    found = results.load(kept, ("tune",))
    assert (found["complete"], found["config"], found["chosen"]) == (False, None, None)
    page = tmp_path / "report.html"
    assert run("report", str(kept), "-o", str(page))[0] == 0
    assert "Whether it pays is not known" in page.read_text()
    assert "Do not speculate" not in page.read_text()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--budget", "0"], "budget: got 0; it must be a number of seconds > 0"),
        (["--budget", "nan"], "budget: got nan"),
        (["--budget", "soon"], "--budget"),
        (["--drafts", "random"], "--drafts: random drafts are never worth running"),
        (["--drafts", "/nowhere/model"], "/nowhere/model: no such file or folder"),
        (["--drafts", "lookup", "ngram:/nowhere"], "/nowhere: no such file"),
        (["-d", "/a/model", "-d", "/b/model"], "--drafts: two have the same name"),
        (["--target", "/nowhere/model"], "/nowhere/model: no such file or folder"),
        (["--prompt", "a"], "--prompt: given together with --data"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        (["--limit", "0"], "--limit"),
        (["-m", "2"], "--max-new-tokens"),
        (["--batch", "0"], "--batch"),
        (["--dtype", "int3"], "dtype: got 'int3'"),
        (["--device", "meta"], "device: meta holds no weights"),
        (["--temperature", "-1"], "temperature: got -1.0"),
        (["--out", "/nowhere/at/all.toml"], "--out: /nowhere/at: no such folder"),
        (["--out", "/tmp"], "--out: /tmp is a folder"),
        (["--results", "/tmp"], "--results: /tmp is a folder"),
        (["--results", "outpace.toml", "--out", "outpace.toml"], "outpace.toml is the file of --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    run: Run, target: str, data: str, tmp_path: Path, words: list[str], why: str
) -> None:
    out = [] if "--out" in words else ["--out", str(tmp_path / "outpace.toml")]
    code, shown, errors = run("tune", *common(target, data), *out, *words)
    assert (code, shown) == (2, "")
    assert why in errors.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("results", "whose"), [("link.json", "--out"), ("outpace.ngram.safetensors", "the n-gram table")]
)
def test_results_and_another_output_in_one_file_are_refused(
    run: Run, target: str, data: str, tmp_path: Path, results: str, whose: str
) -> None:
    out, link = tmp_path / "outpace.toml", tmp_path / "link.json"
    link.symlink_to(out)
    words = ["--out", str(out), "--results", str(tmp_path / results), "--drafts", "ngram"]
    code, _, errors = run("tune", *common(target, data), *words)
    assert code == 2
    assert f"--results: {tmp_path / results} is the file of {whose}, too; name another file" in errors
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no such file"),
        ("num_draft_token = 4", "unknown key 'num_draft_token'"),
        ("draft = 4", "draft: got 4; it must be a string"),
        ("= 4", "not a TOML file"),
        ('rule = "coin"', "rule: got 'coin'"),
        ('num_draft_tokens = "far"', "--num-draft-tokens: got 'far'"),
        ('draft = "ngram:nowhere"', "nowhere: no such file"),
        ('device = "meta"', "device: meta holds no weights"),
    ],
)
def test_a_wrong_configuration_is_one_line(
    run: Run, tmp_path: Path, command: str, text: str | None, why: str
) -> None:
    path = tmp_path / "outpace.toml"
    if text is not None:
        path.write_text(text)
    words = [command, *(["ab"] if command == "generate" else []), "--config", str(path)]
    code, shown, errors = run(*words)
    assert (code, shown) == (2, "")
    assert errors.splitlines()[-1].startswith(f"outpace: config: {path}: ")
    assert why in errors.splitlines()[-1]


def test_a_wrong_flag_is_not_blamed_on_the_configuration(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "outpace.toml"
    path.write_text('rule = "coin"\ntarget = "/nowhere/model"\n')
    code, _, errors = run("generate", "ab", "--config", str(path), "--rule", "dice")
    assert (code, errors.splitlines()[-1].partition(";")[0]) == (2, "outpace: --rule: got 'dice'")
    code, _, errors = run("generate", "ab", "--config", str(path), "--rule", "token")
    assert (code, errors.splitlines()[-1].partition(";")[0]) == (
        2,
        f"outpace: config: {path}: /nowhere/model: no such file or folder",
    )


def test_flags_win_over_the_configuration(run: Run, target: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "outpace.toml"
    path.write_text(
        f'target = "{other}"\ndraft = "lookup"\nnum_draft_tokens = 3\ndtype = "float32"\ndevice = "cpu"\n'
    )
    words = ["generate", "ab ab ab", "--raw", "-m", "8", "--json", "--config", str(path)]
    code, shown, errors = run(*words)
    assert code == 0, errors
    assert "length   Fixed(3)" in json.loads(shown)["settings"]
    code, shown, errors = run(*words, "--num-draft-tokens", "auto", "--target", target, "--rule", "block")
    assert code == 0, errors
    said = json.loads(shown)["settings"]
    assert {"rule     block", "length   Goodput(16)"} <= set(said)
    assert f"{target}: float32 on cpu" in errors
    code, shown, errors = run(*words, "--draft", "none")  # whose length was found for another draft
    assert code == 0, errors
    code, _, errors = run(*words, "--draft", "none", "--num-draft-tokens", "4")
    assert (code, errors.splitlines()[-1]) == (
        2,
        "outpace: --num-draft-tokens: nothing is drafted with --draft none",
    )
