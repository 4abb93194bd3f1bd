"""Wrong flags are refused before PyTorch is imported, files are written or models are loaded."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.cli import checks
from outpace.cli.models import parse_policy
from outpace.models.hub import DTYPES, precision_of
from outpace.sampling import SamplingParams
from outpace.sampling.params import PENALTIES
from outpace.verification.rules import parse
from tests import tiers
from tests.cli import test_help
from tests.cli.conftest import Run

ALL = [
    "generate ab",
    "chat",
    "bench alpha",
    "bench sweep",
    "tune",
    "audit",
    "eval code --data x",
    "transcribe x.wav",
]
SHARED = {"--rule", "--dtype", "--device", "--num-draft-tokens", "--lenience"}
WRONG = {
    "--rule tokn": (
        '--rule: got \'tokn\'; it must be "token", "block", "match" or "sigmoid(ALPHA, BETA)"; '
        'did you mean "token"?'
    ),
    "--rule sigmoid(3,1)": "--rule: got 'sigmoid(3,1)'",
    "--dtype fp8": "--dtype: got 'fp8'",
    "--device gpu": "--device: got 'gpu'",
    "--num-draft-tokens atuo": 'did you mean "auto"?',
    "--num-draft-tokens heuristic:0": "--num-draft-tokens: got 'heuristic:0'",
    "--lenience 0": "--lenience: got 0.0",
    "--temperature -1": "--temperature: got -1.0",
    "--temperature nan": "--temperature: got nan",
    "--temperature 1e300": "--temperature: got 1e+300",
    "--temperature 1e-300": "--temperature: got 1e-300",
    "--top-k -1": "--top-k: got -1",
    "--top-p 2": "--top-p: got 2.0",
    "--min-p 2": "--min-p: got 2.0",
    "--repetition-penalty 0": "--repetition-penalty: got 0.0",
    "--frequency-penalty inf": "--frequency-penalty: got inf",
    "--presence-penalty inf": "--presence-penalty: got inf",
    "--logit-bias 3": "--logit-bias: got '3'",
    "--logit-bias 3=inf": "--logit-bias: got '3=inf'",
    "--seed 99999999999999999999": "--seed: got 99999999999999999999",
    "--n 100000000": "less than or equal to 4096",
    "--batch 100000000": "less than or equal to 4096",
    "--limit 0": "greater than or equal to 1",
    "--config /nowhere.toml": "config: /nowhere.toml: no such file",
    "--target /nowhere/at/all": "/nowhere/at/all: no such file or folder",
    "--prompt ab --data x": "--prompt: given together with --data",
}
# Checks that only one command makes
OF_ONE_COMMAND = {
    "generate ab --lenience 0.5 --rule block": "--lenience: got 0.5 with --rule block",
    "generate ab --draft none --num-draft-tokens 3": "--num-draft-tokens: nothing is drafted",
    "generate ab --svg .": "--svg: . is a folder",
    "generate --file .": ". is a folder; it must be a text file",
    "generate ab --draft lokup": 'draft: lokup: no such file, folder or hub model; did you mean "lookup"?',
    "generate ab --draft ngram:/nowhere": "draft: /nowhere: no such file",
    "chat --draft ngram": "draft: ngram needs a file",
    "bench alpha --out .": "--out: . is a folder",
    "bench alpha --draft none": "--draft: none drafts nothing",
    "bench sweep --out .": "--out: . is a folder",
    "bench sweep --plot /nowhere/at/all.svg": "--plot: /nowhere/at: no such folder",
    "bench sweep --temperature inf": "--temperature: got inf",
    "tune --out .": "--out: . is a folder",
    "tune --results /nowhere/at/all.json": "--results: /nowhere/at: no such folder",
    "transcribe /nowhere.wav": "/nowhere.wav: no such file",
    "transcribe /nowhere.wav --out pyproject.toml": "--out: pyproject.toml is not a folder",
    "generate ab --stop '\udcff'": "--stop: not text in UTF-8",
    "eval summarize --data x --prompt-template ab": "--prompt-template: it must say {source}",
    "eval asr --data x --prompt-template {source}": "--prompt-template: not for asr",
    "bench kernel --device gpu": "--device: got 'gpu'",
    "bench kernel --device mps": "--device: got 'mps'; it must be auto, cpu or cuda",
    "bench kernel --peers /nowhere": "--peers: /nowhere is not a folder",
    "eval code --data x --temperature nan": "--temperature: got nan",
    "transcribe x.wav --draft-dtype int8": "--dtype: got 'int8'",
    "bench kernel --out .": "--out: . is a folder",
    "bench profile --out .": "--out: . is a folder",
    "bench engine --out .": "--out: . is a folder",
    "bench engine --plot /nowhere/at/all.svg": "--plot: /nowhere/at: no such folder",
    "bench engine --dtype fp8": "--dtype: got 'fp8'",
    "plan --alpha 0.8 --plot .": "--plot: .",
}


def opts(command: Any) -> set[str]:
    return {flag for one in command.params for flag in one.opts}


SEVERAL = """
import json, shlex, sys
from outpace.cli import main
import contextlib, io
for line in json.load(sys.stdin):
    sys.argv, errors = ["outpace", *shlex.split(line)], io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
    print(json.dumps([line, code, errors.getvalue(), "torch" in sys.modules]))
"""


def test_a_wrong_flag_is_refused_before_pytorch_is_imported() -> None:
    takes = {name: flags_of(name if name.startswith("bench") else name.split()[0]) for name in ALL}
    for name in ("audit", "eval code --data x"):
        takes[name] &= SHARED
    pairs = [
        (name, words)
        for name in ALL
        for words in WRONG
        if all(one in takes[name] for one in words.split() if one.startswith("--"))
        and not (name == "bench alpha" and "--num-draft-tokens" in words)  # a number there
    ]
    assert len(pairs) > 100
    lines = {
        f"{name} {' '.join(quoted(one) for one in words.split())}": WRONG[words]
        for name, words in tiers.pairwise(pairs, lambda pair: (), lambda pair: pair)
    }
    lines |= OF_ONE_COMMAND
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL], input=json.dumps(list(lines)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(one) for one in done.stdout.splitlines()]
    assert [one[0] for one in found] == list(lines)
    for line, code, errors, imported in found:
        assert code == 2, (line, errors)
        assert len(errors.splitlines()) == 1, (line, errors)
        assert lines[line] in errors, line
        assert not imported, line


def flags_of(command: str) -> set[str]:
    return opts(test_help.ALL[command])


def quoted(word: str) -> str:
    return f"'{word}'"


def test_rule_rejection_is_accepted_but_never_suggested() -> None:
    assert checks.rule("rejection") == "rejection"
    with pytest.raises(ValueError, match="--rule") as raised:
        checks.rule("rejectoin")
    assert "rejection" not in str(raised.value)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", *PENALTIES])
def test_sampling_flags_accept_the_same_ranges_as_sampling_params(name: str) -> None:
    integral = name == "top_k"
    values: list[Any] = (
        [-1, 0, 1, 2]
        if integral
        else [-math.inf, -1.0, -0.1, 0.0, 1e-300, 0.5, 1.0, 1.1, 3.0, 1e300, math.inf, math.nan]
    )
    accepted = [accepts(lambda: checks.number(name)(one)) for one in values]  # noqa: B023
    assert accepted == [accepts(lambda: SamplingParams(**{name: one})) for one in values]  # noqa: B023
    assert True in accepted
    assert False in accepted


@pytest.mark.parametrize(
    "text",
    ["token", "block", "match", "rejection", "tokn", "", "sigmoid", "sigmoid(-1, 1)", "sigmoid(1,-1)",
     "sigmoid(1e4, 2e4)", "sigmoid(a, b)", "sigmoid(1)", "sigmoid(0, inf)", "sigmoid(nan, 1)", "Token"],
)  # fmt: skip
def test_rule_flag_accepts_the_same_rules_as_verification(text: str) -> None:
    assert accepts(lambda: checks.rule(text)) == accepts(lambda: parse(text))


@pytest.mark.parametrize("text", ["42=-1.5", "42=-inf", "42=inf", "42=1e300", "42=nan", "-1=2"])
def test_logit_bias_flag_accepts_the_same_values_as_sampling_params(text: str) -> None:
    token, _, number = text.partition("=")
    known = accepts(lambda: SamplingParams(logit_bias={int(token): float(number)}))
    assert accepts(lambda: checks.logit_bias(text)) == known


@pytest.mark.parametrize("text", ["0", "5", "auto", "heuristic", "heuristic:3"])
def test_every_accepted_num_draft_tokens_gives_a_policy(text: str) -> None:
    assert checks.num_draft_tokens(text) == text
    policy = parse_policy(text)
    assert policy is None if text == "auto" else policy is not None


@pytest.mark.parametrize("text", sorted(DTYPES))
def test_dtypes_have_short_names(text: str) -> None:
    assert precision_of(checks.dtype(text), torch.device("cpu")).is_floating_point


@pytest.mark.parametrize("text", ["cpu", "cuda", "cuda:1", "mps", "xpu:0"])
def test_device_flag_accepts_only_devices_of_pytorch(text: str) -> None:
    assert checks.device(text) == text
    assert torch.device(text).type == text.partition(":")[0]


@pytest.mark.parametrize("name", [name for name, one in test_help.ALL.items() if "--device" in opts(one)])
def test_device_auto_means_the_same_as_no_device_in_every_command(name: str) -> None:
    words = {"eval": ["code", "--data", "x"], "transcribe": ["x.wav"]}.get(name, [])
    for flags in ([], ["--device", "auto"]):
        assert test_help.ALL[name].make_context(name, [*words, *flags]).params["device"] is None


def accepts(call: Any) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("command", ["generate", "chat", "bench alpha", "bench sweep", "tune"])
@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("/nowhere/at/all", "/nowhere/at/all: no such file"),
        ("ngram:/nowhere/at/all", "/nowhere/at/all: no such file"),
        (f"ngram:{__file__}", "holds no n-gram drafter"),
        ("lokup", 'did you mean "lookup"?'),
    ],
    ids=["no model", "no table", "damaged table", "misspelt"],
)
def test_a_missing_draft_is_refused_before_a_model_is_loaded(
    run: Run,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    draft: str,
    why: str,
) -> None:
    from outpace import loading
    from outpace.cli import drafts

    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drafts, "load_model", load)
    monkeypatch.setattr(loading, "load_model", load)
    code, _, errors = run(command, *(["ab"] if command == "generate" else []), "-t", model, "-d", draft)
    assert code == 2
    assert why in errors.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
