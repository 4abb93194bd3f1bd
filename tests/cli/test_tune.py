"""`outpace tune`: recommendations, the configuration file, and results after an interruption."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import SafetensorError

from outpace.bench import results
from outpace.cli.tuned import ModelNames
from outpace.draft.ngram import NGramDrafter
from outpace.models.default import DEFAULT
from outpace.tune import config
from tests.cli.conftest import Run, full_disk, interrupted
from tests.tiny import byte_tokenizer, trained

WORDS = "the sea and the sky and "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model that repeats some words, so that prompt lookup is right."""
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


def test_the_fastest_draft_is_recommended_and_other_commands_use_the_configuration(
    run: Run, target: str, other: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "best.toml"
    flags = [
        "--drafts",
        other,
        "lookup",
        "none",
        "--budget",
        "7",
        "-m",
        "32",
        "--batch",
        "2",
        "-o",
        str(out),
    ]
    code, shown, errors = run("tune", *common(target, data), *flags)
    assert code == 0, errors
    found = results.load(tmp_path / "outpace-tune.json", ("tune",))
    assert found["complete"] is True
    assert found["budget_seconds"] == 7
    assert found["command"].startswith("outpace tune --target")
    assert found["target"] == Path(target).name
    chosen = found["chosen"]
    assert chosen in found["candidates"]
    assert set(chosen) == {
        "draft", "num_draft_tokens", "dtype", "rule", "batch", "expected", "interval", "verified", "why",
    }  # fmt: skip
    assert (chosen["draft"], chosen["dtype"], chosen["rule"]) == ("lookup", "float32", "token")
    assert 1 < chosen["interval"][0] <= chosen["verified"] <= chosen["interval"][1]
    wrong = [one for one in found["candidates"] if one["draft"] == Path(other).name]
    assert wrong
    assert all(one["why"] for one in wrong)
    assert found["verdict"] in " ".join(shown.split())
    for word in ("expected", "verified", "prompt_lookup_num_tokens=", "vllm serve", "--speculative-config"):
        assert word in shown
    assert out.read_text() == found["config"]
    settings = config.read(out)
    assert (settings["target"], settings["draft"], settings["dtype"]) == (target, "lookup", "float32")
    assert settings["measured"]["interval"] == chosen["interval"]
    assert {one.name for one in tmp_path.iterdir()} == {"best.toml", "outpace-tune.json"}

    text, _ = generated(run, out)
    baseline_text, errors = generated(run, out, "--draft", "none")
    assert text == baseline_text
    assert "accepted" not in errors
    page = tmp_path / "report.html"
    assert run("report", str(tmp_path / "outpace-tune.json"), "-o", str(page))[0] == 0
    assert "Tuning candidates" in page.read_text()


def generated(run: Run, configuration: Path, *flags: str) -> tuple[str, str]:
    words = ["--config", str(configuration), "--raw", "--temperature", "0", "-m", "20"]
    code, out, errors = run("generate", WORDS, *words, *flags)
    assert code == 0, errors
    return out, errors


@pytest.mark.full
def test_an_ngram_table_is_saved_beside_the_configuration_that_names_it(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "outpace.toml"
    words = ["--drafts", "ngram", "--budget", "7", "-m", "32", "--batch", "1", "-o", str(out)]
    code, _, errors = run("tune", *common(target, data), *words)
    assert code == 0, errors
    assert 'draft = "ngram:outpace.ngram.safetensors"' in out.read_text()
    monkeypatch.chdir(tmp_path.parent)
    assert "accepted" in generated(run, out)[1]


def test_without_a_draft_that_pays_the_configuration_has_none(
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
    assert "num_draft_tokens" not in config.read(out)
    assert "accepted" not in generated(run, out)[1]
    assert "accepted" in generated(run, out, "--draft", "lookup")[1]
    code, shown, _ = run("tune", *common(target, data), "none", "--budget", "10", "-o", str(out))
    assert code == 0
    assert "Do not speculate: no draft was named." in shown


@pytest.mark.full
def test_logit_bias_applies_and_is_recorded(run: Run, target: str, data: str, tmp_path: Path) -> None:
    words = ["-d", "lookup", "--budget", "8", "-m", "24", "--batch", "1", "--logit-bias", "0=-inf"]
    code, _, errors = run("tune", *common(target, data), *words, "-o", str(tmp_path / "outpace.toml"))
    assert code == 0, errors
    assert config.read(tmp_path / "outpace.toml")["measured"]["sampling"]["logit_bias"] == {"0": -math.inf}


@pytest.mark.full
def test_ctrl_c_saves_the_results_so_far(target: str, data: str, tmp_path: Path) -> None:
    out, saved = tmp_path / "outpace.toml", tmp_path / "found.json"
    flags = ["-d", "lookup", "--budget", "2000", "-m", "48", "-o", str(out), "--results", str(saved)]
    code, shown, errors = interrupted(
        ["tune", *common(target, data), *flags],
        lambda: saved.exists() and json.loads(saved.read_text())["rounds"] >= 4,
        before="from outpace.tune import race; race.SETTLED_PROMPTS, race.MAX_REPEATS = 10**9, 10**9",
    )
    assert code == 130, errors
    found = results.load(saved, ("tune",))
    assert found["complete"] is False
    assert found["rounds"] >= 4
    assert found["chosen"]["draft"] == "lookup"
    assert "speedup over the baseline" in shown
    assert f"these are the results so far, also in {saved}" in errors.splitlines()[-1]
    assert config.read(out)["draft"] == "lookup"
    assert not [one for one in tmp_path.iterdir() if one not in (out, saved)]


def test_with_a_full_disk_the_results_are_still_printed(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=3)  # the stages costs, n-gram table, acceptance
    out = tmp_path / "outpace.toml"
    words = ["-d", "lookup", "--budget", "20", "-m", "24", "-o", str(out)]
    code, shown, errors = run("tune", *common(target, data), *words)
    assert code == 2
    assert "speedup over the baseline" in shown
    *_, summary, error = errors.splitlines()
    assert summary.endswith("s: these are the results so far, and no configuration was written")
    results_file = tmp_path / "outpace-tune.json"
    assert error == f"outpace: {results_file}: it cannot be written (No space left on device)"
    assert not out.exists()


@pytest.mark.full
def test_if_the_ngram_table_cannot_be_saved_the_results_are_still_printed(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(NGramDrafter, "save", full)
    out = tmp_path / "outpace.toml"
    words = ["--drafts", "ngram", "--budget", "7", "-m", "32", "--batch", "1", "-o", str(out)]
    code, shown, errors = run("tune", *common(target, data), *words)
    assert code != 0
    assert "Draft with ngram" in shown
    assert "and no configuration was written" in errors
    assert not out.exists()


def test_a_configuration_of_the_default_model_names_no_target() -> None:
    assert ModelNames(DEFAULT, {}, Path("t"), "cpu").in_configuration is None
    assert ModelNames("org/big", {}, Path("t"), "cpu").in_configuration == "org/big"


def test_names_for_other_libraries_are_hub_ids_or_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "big").mkdir()
    drafts = {"small": "org/small", DEFAULT: DEFAULT, "big": "big"}
    names = ModelNames("~/big", drafts, Path("outpace.ngram.safetensors"), "cpu")
    assert names.in_other_libraries() == names.in_other_libraries("big") == str(tmp_path / "big")
    assert names.in_other_libraries("small") == "org/small"
    assert names.in_other_libraries("lookup") == "lookup"
    assert names.in_other_libraries(DEFAULT) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert names.in_other_libraries("ngram") == f"ngram:{tmp_path / 'outpace.ngram.safetensors'}"
    assert (
        ModelNames(DEFAULT, {}, Path("t"), "cpu").in_other_libraries()
        == "HuggingFaceTB/SmolLM2-135M-Instruct"
    )


@pytest.mark.parametrize("after_costs", [False, True])
def test_ctrl_c_before_a_result_writes_no_configuration(
    run: Run, target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_costs: bool
) -> None:
    from outpace.tune.tuning import Tuning

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuning, "race" if after_costs else "time_target", interrupted)
    out = tmp_path / "outpace.toml"
    code, shown, errors = run("tune", *common(target, data), "-d", "lookup", "-m", "24", "-o", str(out))
    assert code == 130
    assert not out.exists()
    if after_costs:
        sentence = "Whether it pays is not known: it was interrupted before whole texts were measured; lookup"
        assert sentence in " ".join(shown.split())
        assert errors.splitlines()[-1].endswith("and no configuration was written")
        assert results.load(tmp_path / "outpace-tune.json")["complete"] is False
    else:
        assert shown == ""
        assert errors.splitlines()[-1] == "interrupted: nothing was measured yet, and nothing was saved"
        assert not list(tmp_path.iterdir())


def test_without_time_there_is_no_verdict_and_the_configuration_stays(
    run: Run, target: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "outpace.toml"
    out.write_text("an earlier one")
    words = ["-d", "lookup", "--budget", "0.01", "-o", str(out)]
    code, shown, errors = run("tune", *common(target, data), *words)
    assert code == 1
    assert out.read_text() == "an earlier one"
    output = " ".join(shown.split())
    reason = "there was no time to measure whole texts in 0.01 s; about "
    assert f"Whether it pays is not known: {reason}" in output
    assert "Do not speculate" not in output
    assert "model.generate" not in output
    assert errors.splitlines()[-1].endswith("of 0.01 s, and no configuration was written")
    saved = tmp_path / "outpace-tune.json"
    found = results.load(saved, ("tune",))
    assert (found["complete"], found["config"], found["chosen"]) == (False, None, None)
    page = tmp_path / "report.html"
    assert run("report", str(saved), "-o", str(page))[0] == 0
    assert "Whether it pays is not known" in page.read_text()
    assert "Do not speculate" not in page.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget", "0"], "budget: got 0; it must be a number of seconds > 0"),
        (["--budget", "nan"], "budget: got nan"),
        (["--budget", "soon"], "--budget"),
        (["--drafts", "random"], "--drafts: random drafts never pay"),
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
def test_a_wrong_flag_is_a_one_line_error_and_no_file_is_written(
    run: Run, target: str, data: str, tmp_path: Path, flags: list[str], message: str
) -> None:
    out = [] if "--out" in flags else ["--out", str(tmp_path / "outpace.toml")]
    code, shown, errors = run("tune", *common(target, data), *out, *flags)
    assert (code, shown) == (2, "")
    assert message in errors.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("results", "other_output"), [("link.json", "--out"), ("outpace.ngram.safetensors", "the n-gram table")]
)
def test_two_outputs_in_one_file_are_refused(
    run: Run, target: str, data: str, tmp_path: Path, results: str, other_output: str
) -> None:
    out, link = tmp_path / "outpace.toml", tmp_path / "link.json"
    link.symlink_to(out)
    words = ["--out", str(out), "--results", str(tmp_path / results), "--drafts", "ngram"]
    code, _, errors = run("tune", *common(target, data), *words)
    assert code == 2
    assert f"--results: {tmp_path / results} is the file of {other_output}, too; name another file" in errors
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("text", "message"),
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
def test_a_wrong_configuration_is_a_one_line_error(
    run: Run, tmp_path: Path, command: str, text: str | None, message: str
) -> None:
    path = tmp_path / "outpace.toml"
    if text is not None:
        path.write_text(text)
    words = [command, *(["ab"] if command == "generate" else []), "--config", str(path)]
    code, shown, errors = run(*words)
    assert (code, shown) == (2, "")
    assert errors.splitlines()[-1].startswith(f"outpace: config: {path}: ")
    assert message in errors.splitlines()[-1]


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
    assert "num_draft_tokens  Fixed(3)" in json.loads(shown)["settings"]
    code, shown, errors = run(*words, "--num-draft-tokens", "auto", "--target", target, "--rule", "block")
    assert code == 0, errors
    said = json.loads(shown)["settings"]
    assert {"rule              block", "num_draft_tokens  Goodput(16)"} <= set(said)
    assert f"{target}: float32 on cpu" in errors
    # The configured num_draft_tokens belongs to another draft, so it is ignored.
    code, shown, errors = run(*words, "--draft", "none")
    assert code == 0, errors
    code, _, errors = run(*words, "--draft", "none", "--num-draft-tokens", "4")
    assert (code, errors.splitlines()[-1]) == (
        2,
        "outpace: --num-draft-tokens: nothing is drafted with --draft none",
    )
