"""A configuration file sets the defaults of every command that names models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.cli import drafts
from tests.cli.conftest import Run
from tests.cli.test_help import ALL
from tests.test_loading import needing_code

NAMING = ["generate", "chat", "transcribe", "bench alpha", "bench sweep", "tune", "audit", "eval"]
PROMPTS = ["--prompt", "ab ab ab ab", "--prompt", "ba ba ba"]


@pytest.fixture
def config(model: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("outpace.toml").write_text(
        f'target = "{model}"\ndraft = "{other}"\nnum_draft_tokens = 4\nrule = "token"\n'
        'dtype = "fp32"\ndevice = "cpu"\nrevision = "v1"\nmax_batch = 4\n'
    )
    return "outpace.toml"


def stop(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[dict[str, Any]]:
    """Stop a command where it loads models, and return the arguments of the call."""
    calls: list[dict[str, Any]] = []

    def load(*arguments: Any, **options: Any) -> None:
        calls.append({"arguments": arguments, **options})
        raise ValueError("models are loaded here")

    patch.setattr(module, name, load)
    return calls


@pytest.mark.parametrize("command", NAMING)
def test_every_command_that_names_models_has_all_model_flags(command: str) -> None:
    flags = {flag for one in ALL[command].params for flag in one.opts}
    assert {"--config", "--trust-remote-code", "--revision", "--target", "--device", "--dtype"} <= flags


def test_a_configured_revision_applies_only_to_the_configured_target(
    run: Run, config: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stop(monkeypatch, generate_module(), "open_decoder")
    run("generate", "ab", "--config", config)
    run("generate", "ab", "--config", config, "--target", other)
    run("generate", "ab", "--config", config, "--revision", "v2", "--trust-remote-code")
    models = [one["arguments"][0] for one in calls]
    assert [one.revision for one in models] == ["v1", None, "v2"]
    assert [one.trust_remote_code for one in models] == [False, False, True]
    assert (models[0].device, models[0].dtype) == ("cpu", "float32")


def generate_module() -> Any:
    import importlib

    return importlib.import_module("outpace.cli.generate")


@pytest.mark.parametrize("command", ["bench alpha", "bench sweep", "tune"])
def test_measuring_commands_measure_the_models_of_the_configuration(
    run: Run, config: str, model: str, other: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    calls = stop(monkeypatch, drafts, "load_decoders")
    assert run(command, "--config", config)[0] == 2
    (call,) = calls
    found = ["lookup", other] if command == "tune" else [other]
    assert call["arguments"] == (model, found, "cpu", "float32")
    assert (call["revision"], call["trust_remote_code"]) == ("v1", False)
    calls.clear()
    run(command, "--config", config, "--draft", "lookup", "--target", other, "--trust-remote-code")
    (call,) = calls
    assert call["arguments"] == (other, ["lookup"], "cpu", "float32")
    assert (call["revision"], call["trust_remote_code"]) == (None, True)


def test_drafts_on_the_command_line_are_measured_beside_the_configured_one(
    run: Run, config: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stop(monkeypatch, drafts, "load_decoders")
    run("tune", "lookup", "--config", config)
    assert calls[0]["arguments"][1] == [other, "lookup"]


def test_a_sweep_also_measures_the_configured_num_draft_tokens(run: Run, config: str) -> None:
    without_revision(config)
    code, _, errors = run("bench sweep", "--config", config, "-m", "16", *PROMPTS)
    assert code == 0, errors
    line = "num_draft_tokens 8, 12: left out, as texts of 16 tokens are too short; "
    assert line + "--max-new-tokens 27 is enough" in errors.splitlines()
    found = json.loads(Path("sweep.json").read_text())["figures"]
    assert [one["num_draft_tokens"] for one in found] == ["0", "1", "2", "3", "5", "auto", "4"]
    code, _, errors = run("bench sweep", "--config", config, "-m", "16", "--num-draft-tokens", "1", *PROMPTS)
    assert code == 0, errors
    assert "left out" not in errors
    found = json.loads(Path("sweep.json").read_text())["figures"]
    assert [one["num_draft_tokens"] for one in found] == ["0", "1"]


def test_bench_alpha_runs_with_a_configuration(run: Run, config: str, other: str) -> None:
    small = [
        "-m",
        "6",
        "--context",
        "8",
        "--pass",
        "1",
        "--batch",
        "1",
        "--num-draft-tokens",
        "1",
        "--lenience",
        "1",
    ]
    without_revision(config)
    code, _, errors = run("bench alpha", "--config", config, *small, *PROMPTS)
    assert code == 0, errors
    found = json.loads(Path("alpha.json").read_text())
    assert [one["draft"] for one in found["drafts"]] == [Path(other).name]


def without_revision(config: str) -> None:
    """Remove the revision, because the models of these tests are folders."""
    Path(config).write_text(Path(config).read_text().replace('revision = "v1"\n', ""))


@pytest.mark.parametrize("command", ["bench alpha", "tune"])
def test_a_rule_that_a_command_does_not_run_is_refused(run: Run, config: str, command: str) -> None:
    Path(config).write_text('rule = "match"\n')
    code, out, errors = run(command, "--config", config)
    assert (code, out) == (2, "")
    line = f"rule: got 'match'; `outpace {command}` runs rule token alone, so leave the key out"
    assert errors == f"outpace: config: outpace.toml: {line}\n"


@pytest.mark.parametrize("command", ["bench alpha", "bench sweep", "tune"])
def test_measuring_commands_use_their_default_drafts_if_the_configured_draft_is_none(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    calls = stop(monkeypatch, drafts, "load_decoders")
    Path(config).write_text('draft = "none"\n')
    _, _, errors = run(command, "--config", config)
    assert [one["arguments"][1] for one in calls] == [["lookup"]], errors


def test_a_configured_num_draft_tokens_applies_only_to_the_configured_draft(
    run: Run, config: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stop(monkeypatch, generate_module(), "open_decoder")
    for words in (
        [],
        ["-d", other],
        ["-d", "lookup"],
        ["-d", "none"],
        ["-d", "lookup", "--num-draft-tokens", "2"],
    ):
        run("generate", "ab", "--config", config, *words)
    assert [one["arguments"][0].num_draft_tokens for one in calls] == ["4", "4", None, None, "2"]


@pytest.mark.parametrize("role", ["--target", "--draft"])
@pytest.mark.parametrize("command", ["chat", "bench alpha", "bench sweep", "tune"])
def test_remote_code_runs_only_with_the_flag(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, role: str
) -> None:
    monkeypatch.chdir(tmp_path)
    remote = needing_code(tmp_path)
    words = [command, "--target", model, role, str(remote), "--device", "cpu", "--dtype", "float32"]
    code, out, errors = run(*words, stdin="y\n" * 9)
    assert (code, out) == (2, "")
    assert errors.splitlines()[-1].endswith("--trust-remote-code, or trust_remote_code=True in Python")
    assert not (tmp_path / "ran").exists()
    stop(monkeypatch, drafts, "select_fitting")
    run(*words, "--trust-remote-code")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", NAMING)
def test_a_misspelt_key_is_refused_with_a_suggestion(run: Run, config: str, command: str) -> None:
    Path(config).write_text("num_draft_token = 4\n")
    words = {"generate": ["ab"], "transcribe": ["x.wav"], "eval": ["specbench"]}.get(command, [])
    code, _, errors = run(command, *words, "--config", config)
    assert code == 2
    assert errors.startswith(
        "outpace: config: outpace.toml: unknown key 'num_draft_token'; known are target, draft, "
    )
    assert errors.endswith('; did you mean "num_draft_tokens"?\n')


def test_a_configuration_cannot_set_trust_remote_code(run: Run, config: str) -> None:
    Path(config).write_text("trust_remote_code = true\n")
    code, _, errors = run("generate", "ab", "--config", config)
    assert code == 2
    assert "unknown key 'trust_remote_code'" in errors
