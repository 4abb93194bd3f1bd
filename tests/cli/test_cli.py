"""The commands `generate`, `chat` and `doctor`: output, errors and exit status."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outpace import loading
from outpace.cli import drafts
from outpace.decoder import Decoder
from outpace.engine.eager import EagerExecutor
from outpace.engine.executor import Pending
from tests.cli.conftest import Run, buffered
from tests.tiny import byte_tokenizer, tiny, tiny_seq2seq

PROMPT = "ab ab ab ab ab"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def common(model: str) -> list[str]:
    return ["--target", model, "--dtype", "float32", "--device", "cpu", "-m", "24"]


@pytest.mark.parametrize(
    ("words", "output"), [(["--version"], "outpace 0.1.0"), (["plan", "--alpha", "0.8"], "Draft g = 32")]
)
def test_commands_that_need_no_pytorch_do_not_import_it(words: list[str], output: str) -> None:
    code = (
        f"import sys; sys.argv = ['outpace', *{words}]\n"
        "from outpace.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(output)
    assert done.stdout.splitlines()[-1] == "False"


def test_every_command_has_help(run: Run) -> None:
    for command in (
        "generate",
        "chat",
        "transcribe",
        "eval",
        "plan",
        "bench sweep",
        "tune",
        "audit",
        "doctor",
    ):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert "Usage: outpace " + command in out


def test_text_goes_to_stdout_and_statistics_go_to_stderr(run: Run, model: str) -> None:
    code, out, err = run("generate", PROMPT, "--raw", "--num-draft-tokens", "3", *common(model))
    assert code == 0
    assert f"{model}: float32 on cpu" in err.splitlines()
    assert "24 tokens | " in err
    assert "tokens per target pass | accepted" in err
    expected = Decoder(tiny(vocab_size=272), None, byte_tokenizer()).generate(
        PROMPT, temperature=0, max_new_tokens=24
    )
    assert out == f"{expected.text}\n"


def test_verbose_prints_the_steps_and_what_the_policy_knows(run: Run, model: str) -> None:
    code, _, err = run("generate", PROMPT, "--raw", "--verbose", "--num-draft-tokens", "3", *common(model))
    assert code == 0
    lines = err.splitlines()
    head = lines.index("draft tokens   steps  ms per step")
    assert all(re.match(r" +[0-3] +[1-9]\d* +\d+\.\d\d$", line) for line in lines[head + 1 : -2])
    assert re.match(r"\d+% of the steps were speculative; exploration took about 0\.000 of", lines[-2])
    assert lines[-1] == "policy: Fixed(3)"


@pytest.mark.parametrize("source", ["argument", "file", "stdin", "dash"])
def test_a_prompt_comes_from_argument_file_or_stdin(
    run: Run, model: str, tmp_path: Path, source: str
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    arguments = {
        "argument": [PROMPT],
        "file": ["--file", str(tmp_path / "prompt.txt")],
        "stdin": [],
        "dash": ["-"],
    }[source]
    code, out, _ = run("generate", *arguments, "--json", *common(model), stdin=PROMPT + "\n")
    assert code == 0
    assert json.loads(out)["prompt"] == PROMPT


def test_the_chat_template_is_used_unless_the_prompt_is_raw(run: Run, model: str) -> None:
    lengths = []
    for flags in ([], ["--raw"], ["--system", "s"]):
        _, out, _ = run("generate", PROMPT, "--json", *flags, *common(model))
        lengths.append(json.loads(out)["prompt_tokens"])
    tokenizer = byte_tokenizer()
    texts = [f"[user]{PROMPT}[bot]", PROMPT, f"[system]s[user]{PROMPT}[bot]"]
    assert lengths == [len(tokenizer(text).input_ids) for text in texts]


def test_marks_distinguish_accepted_corrected_and_bonus_tokens(run: Run, model: str) -> None:
    own = "--draft", model, "--num-draft-tokens", "3"
    code, out, err = run("generate", PROMPT, "--raw", "--marks", *own, *common(model))
    assert code == 0
    assert "[marked] an accepted draft token" in err
    counts = [out.count(mark) for mark in "[]<>"]  # the draft is the target, so no token is corrected
    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[3] > 0
    assert "{" not in out


def test_a_terminal_shows_colours_or_marks_with_no_color(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    screens = []
    for flags in ([], ["--no-color"]):
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        own = "--draft", model, "--num-draft-tokens", "3"
        assert run("generate", PROMPT, "--raw", *own, *flags, *common(model))[0] == 0
        screens.append(screen.getvalue())
    assert "\033[32m" in screens[0]
    assert "\033" not in screens[1]
    assert "[" in screens[1]


def test_json_has_texts_tokens_settings_and_statistics(run: Run, model: str) -> None:
    code, out, _ = run(
        "generate", PROMPT, "--json", "--n", "3", "--temperature", "0.9", "--seed", "4",
        "--num-draft-tokens", "2", *common(model),
    )  # fmt: skip
    assert code == 0
    report = json.loads(out)
    assert len(report["outputs"]) == 3
    assert len({one["text"] for one in report["outputs"]}) == 3
    first = report["outputs"][0]
    assert len(first["token_ids"]) == first["stats"]["new_tokens"] == 24
    assert first["finish_reason"] == "length"
    assert first["stats"]["target_passes"] > 0
    again = json.loads(
        run("generate", PROMPT, "--json", "--n", "3", "--temperature", "0.9", "--seed", "4",
            "--num-draft-tokens", "2", *common(model))[1]
    )  # fmt: skip
    assert [one["token_ids"] for one in again["outputs"]] == [one["token_ids"] for one in report["outputs"]]


def test_several_samples_are_printed_one_after_the_other(run: Run, model: str) -> None:
    code, out, err = run(
        "generate",
        PROMPT,
        "--n",
        "2",
        "--temperature",
        "1",
        "--seed",
        "1",
        "--num-draft-tokens",
        "2",
        *common(model),
    )
    assert code == 0
    assert [line for line in err.splitlines() if line.endswith("of 2")] == ["1 of 2", "2 of 2"]
    report = json.loads(
        run(
            "generate",
            PROMPT,
            "--n",
            "2",
            "--temperature",
            "1",
            "--seed",
            "1",
            "--json",
            "--num-draft-tokens",
            "2",
            *common(model),
        )[1]
    )
    assert out == "".join(one["text"] + "\n" for one in report["outputs"])


def test_the_comparison_lists_every_decoder_with_its_ratios(run: Run, model: str) -> None:
    code, out, _ = run("generate", PROMPT, "--raw", "--json", "--compare", *common(model))
    assert code == 0
    by_name = {one["name"]: one for one in json.loads(out)["comparison"]}
    assert set(by_name) == {
        "outpace, LookupDrafter",
        "outpace, baseline",
        "Transformers generate",
        "Transformers prompt lookup",
    }
    assert all(one["text"] == "same" for one in by_name.values())
    assert by_name["outpace, baseline"]["over_baseline"] == 1
    assert by_name["Transformers generate"]["over_transformers"] == 1
    code, _, err = run("generate", PROMPT, "--raw", "--compare", "--draft", model, *common(model))
    assert code == 0
    assert "Transformers assisted" in err


def test_the_comparison_runs_transformers_with_the_same_settings(run: Run, model: str) -> None:
    flags = ["--frequency-penalty", "1.5", "--logit-bias", "97=5", "--temperature", "0", "--stop", "b"]
    code, out, _ = run("generate", PROMPT, "--raw", "--json", "--compare", *flags, *common(model))
    assert code == 0
    assert {one["text"] for one in json.loads(out)["comparison"]} == {"same"}


def test_samples_keep_their_order_whichever_finishes_first(run: Run, model: str) -> None:
    flags = ["--temperature", "1", "--seed", "3", "--stop", "a", "--stop", "e", "--stop", "1"]
    expected = Decoder(tiny(vocab_size=272), None, byte_tokenizer(), rule="match").generate(
        PROMPT, temperature=1.0, seed=3, stop=["a", "e", "1"], n=6, max_new_tokens=24
    )
    found = json.loads(
        run("generate", PROMPT, "--raw", "--json", "--n", "6", "--rule", "match", *flags, *common(model))[1]
    )["outputs"]
    assert [one["token_ids"] for one in found] == [one.token_ids for one in expected]
    assert len({len(one["token_ids"]) for one in found}) > 1


def test_svg_writes_a_valid_picture_with_a_legend(run: Run, model: str, tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    assert run("generate", PROMPT, "--raw", "--svg", str(picture), *common(model))[0] == 0
    svg = picture.read_text()
    ElementTree.fromstring(svg)
    assert not picture.with_name("out.svg.part").exists()
    assert "an&#160;accepted&#160;draft&#160;token" in svg


def test_a_picture_that_cannot_be_written_is_refused_before_generation(
    run: Run, model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "out.svg"
    folder.mkdir()
    code, out, err = run("generate", PROMPT, "--raw", "--svg", str(folder), *common(model))
    assert (code, out, err) == (2, "", f"outpace: --svg: {folder} is a folder\n")
    assert [*tmp_path.iterdir()] == [folder]


def test_output_says_that_the_context_is_full(run: Run, model: str) -> None:
    flags = ["generate", PROMPT, "--raw", *common(model)]
    _, _, err = run(*flags, "-m", "100000")
    line = err.splitlines()[-1]
    assert f"{128 - len(byte_tokenizer()(PROMPT).input_ids)} tokens | " in line
    assert line.endswith(" | the model's context of 128 tokens is full")
    assert "context" not in run(*flags)[2]
    for most, full in (("100000", True), ("24", False)):
        (only,) = json.loads(run(*flags, "--json", "-m", most)[1])["outputs"]
        assert (only["finish_reason"], only["context_full"]) == ("length", full)
    _, _, err = run("chat", *common(model), "-m", "100000", stdin="ab\n")
    assert err.splitlines()[-1].endswith("the model's context of 128 tokens is full; /new starts again")


@pytest.mark.parametrize("command", ["generate", "chat", "bench alpha", "bench sweep", "tune"])
def test_the_error_for_a_speech_model_names_the_command_transcribe(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = seq2seq(tmp_path, "whisper")
    for module in (loading, drafts):
        monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    code, out, err = run(command, *(["ab"] if command == "generate" else []), "-t", folder)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        f"outpace: {folder}: its input is speech; use `outpace transcribe`"
    )


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_models_with_an_encoder_generate_from_a_prompt(run: Run, tmp_path: Path, family: str) -> None:
    flags = ["generate", PROMPT, "-t", seq2seq(tmp_path, family), "-m", "4", "--temperature", "0"]
    code, out, err = run(*flags, "--json")
    assert code == 0, err
    expected = Decoder(tiny_seq2seq(family, vocab_size=272), None, byte_tokenizer()).generate(
        PROMPT, temperature=0, max_new_tokens=4
    )
    assert json.loads(out)["outputs"][0]["token_ids"] == expected.token_ids
    code, out, err = run(*flags, "--compare")
    assert (code, out) == (2, "")
    assert "--compare: models with an encoder cannot be compared yet" in err


def seq2seq(folder: Path, family: str) -> str:
    tiny_seq2seq(family, vocab_size=272).save_pretrained(folder / family)
    byte_tokenizer().save_pretrained(folder / family)
    return str(folder / family)


def test_ctrl_c_prints_the_text_so_far(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = EagerExecutor.start, []

    def start(self: EagerExecutor, *rest: Any) -> Pending:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *rest)

    monkeypatch.setattr(EagerExecutor, "start", start)
    code, out, err = run("generate", PROMPT, "--raw", *common(model))
    assert code == 130
    assert out.strip()
    assert out.endswith("\n")
    assert "interrupted" in err
    calls.clear()
    code, out, _ = run("generate", PROMPT, "--raw", "--json", *common(model))
    assert code == 130
    (only,) = json.loads(out)["outputs"]
    assert only["finish_reason"] == "interrupted"
    assert only["token_ids"]
    calls.clear()
    code, out, _ = run("generate", PROMPT, "--raw", "--n", "2", *common(model))
    assert code == 130
    assert len(out.splitlines()) >= 2


def test_chat_keeps_earlier_turns_until_new(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    original = Decoder.stream

    def stream(self: Decoder, ids: list[int], *rest: Any, **options: Any) -> Any:
        seen.append(ids)
        return original(self, ids, *rest, **options)

    monkeypatch.setattr(Decoder, "stream", stream)
    code, out, _ = run("chat", *common(model), stdin="ab\n\ncd\n/new\nab\n/exit\nnot read\n")
    assert code == 0
    assert len(out.splitlines()) >= 3
    tokenizer = byte_tokenizer()
    assert len(seen) == 3
    assert seen[0] == seen[2] == tokenizer("[user]ab[bot]").input_ids
    assert tokenizer.decode(seen[1]).startswith("[user]ab[assistant]")


def test_doctor_lists_packages_bandwidth_and_extras(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["packages"]["torch"].startswith("2.")
    assert "GB/s" in found["read bandwidth"]
    installed = found["packages"]["outpace"] != "missing"  # and not run from a checkout
    assert ("gpu" in found["extras"]) == installed
    assert "read bandwidth" in run("doctor")[1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["generate", ""], "prompt: it is empty"),
        (["generate", "a", "--file", "b"], "--file: given together with a prompt"),
        (["generate", "--file", "/nowhere/at/all"], "/nowhere/at/all: no such file"),
        (["generate", "a", "--json", "--marks"], "--json: text in JSON has no marks"),
        (["generate", "a", "--raw", "--system", "b"], "--raw: a raw prompt has no system message"),
        (
            ["generate", "a", "--num-draft-tokens", "3", "--draft", "none"],
            "--num-draft-tokens: nothing is drafted",
        ),
        (["generate", "a", "--num-draft-tokens", "far"], "--num-draft-tokens: got 'far'"),
        (["generate", "a", "--logit-bias", "x"], "--logit-bias: got 'x'"),
        (["generate", "a", "--temperature", "-1"], "temperature: got -1.0"),
        (["generate", "a", "--temperature", "warm"], "--temperature"),
        (["generate", "a", "--n", "0"], "--n"),
        (["generate", "a", "--rule", "coin"], "rule: got 'coin'"),
        (["generate", "a", "--lenience", "0.5", "--rule", "block"], "lenience"),
        (["generate", "a", "--target", "/nowhere/model"], "/nowhere/model: no such file or folder"),
        (["generate", "a", "--draft", "ngram:/nowhere"], "/nowhere: no such file"),
        (["generate", "a", "--draft", __file__], "not a GGUF file"),
        (["generate", "a", "--dtype", "int3"], "dtype: got 'int3'"),
        (["generate", "a", "--device", "meta"], "device: meta holds no weights"),
        (["generate", "a", "--draft", ""], "the name is empty"),
        (["generate", "a", "--lenience", "0.5", "--draft", "none"], "--lenience: nothing is drafted"),
        (["generate", "a", "--svg", "/nowhere/at/all.svg"], "--svg: /nowhere/at: no such folder"),
        (["generate", "a", "--svg", "x.svg", "--json"], "--svg: JSON output has no picture"),
        (["generate", "a\udce4"], "prompt: not text in UTF-8"),
        (["generate", "a", "--nonsense"], "--nonsense"),
        (["audit", "--plant", "gremlin"], "--plant: got 'gremlin'"),
        (["audit", "--draft", "none"], "nothing to audit"),
        (["conjure"], "conjure"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_line_on_stderr_and_status_2(
    run: Run, model: str, arguments: list[str], why: str
) -> None:
    if arguments[0] == "generate" and "--target" not in arguments:
        arguments = [*arguments, "--target", model]
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("outpace: ")
    assert why in last
    assert len([line for line in err.splitlines() if line.startswith("outpace: ")]) == 1


@pytest.mark.parametrize(
    "command",
    ["plan", *(pytest.param(name, marks=pytest.mark.full) for name in ("generate", "audit", "doctor"))],
)
def test_a_closed_pipe_gives_one_line_on_stderr(model: str, command: str) -> None:
    arguments = {
        "generate": [PROMPT, *common(model)],
        "audit": ["--target", model, "--draft", model, "--samples", "0"],
        "doctor": [],
        "plan": ["--alpha", "0.8", "--json"],
    }[command]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "outpace", command, *arguments],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env=buffered(),
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "outpace: the output was closed before the end"
    assert "Traceback" not in done.stderr
