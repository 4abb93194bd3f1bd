"""`outpace eval`: quality and speed of every runner; a stopped run resumes and gives the same table."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from outpace import Decoder, Fixed, SamplingParams
from outpace.bench import data
from outpace.bench.data import Item
from outpace.cli import app
from outpace.tasks import kinds, sandbox, score, table
from outpace.tasks.assisted import cut_at_stop
from outpace.tasks.evaluate import Evaluation
from outpace.tasks.journal import Journal
from outpace.tasks.kinds import RUNNERS
from outpace.tasks.runners import OutpaceRunner, RunSettings
from tests import tiers
from tests.tasks.whisper import PROCESSOR, RATE, tiny_whisper
from tests.tiny import byte_tokenizer, tiny, tiny_seq2seq

HANG_SECONDS = 120  # a run that takes longer is stuck


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a target and a draft model in folders."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("draft", 1)):
        tiny(vocab_size=272, seed=seed, max_position_embeddings=256).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Write rows that several tasks can use."""
    rows: list[dict[str, Any]] = [
        {"id": f"r{i}", "category": ("writing", "qa")[i % 2], "turns": ["abc", "de"][: 1 + i % 2],
         "source": "abc", "prompt": f"count {i}", "reference": f"one two {i}"}
        for i in range(6)
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


PACKAGES = {"asr": ("jiwer", "soundfile", "soxr"), "summarize": ("rouge_score",), "translate": ("sacrebleu",)}


def require_packages(*tasks: str) -> None:
    """Skip a test if packages for the measures of these tasks are not installed."""
    for package in itertools.chain(*(PACKAGES.get(task, ()) for task in tasks)):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'outpace[tasks]'")


def run(models: Path, task: str, *words: str) -> Result:
    command = ["eval", task, "-t", str(models / "target"), "--dtype", "float32", *words]
    return CliRunner().invoke(app, command)


def records(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(one["runner"], one["row"]): one for one in lines[1:]}


def untimed_lines(path: Path) -> list[str]:
    """Return the lines of a saved table that do not depend on measured time."""
    timed = ("sampling step", "wall clock", "tokens/s", "over baseline", "P50", "P90", "P99")
    lines = [line for line in path.read_text().splitlines() if not line[2:].startswith(timed)]
    return [line for line in lines if "x |" not in line]


@pytest.mark.parametrize(
    ("task", "draft"),
    tiers.each_value(["specbench", "dialog", "summarize", "translate"], ["draft", "lookup"]),
)
def test_greedy_runners_generate_the_same_texts(
    models: Path, prompts: Path, tmp_path: Path, task: str, draft: str
) -> None:
    require_packages(task)
    out = tmp_path / "out.jsonl"
    drafter = str(models / "draft") if draft == "draft" else draft
    done = run(models, task, "-d", drafter, "--data", str(prompts), "-m", "12", "-o", str(out))
    assert done.exit_code == 0, done.output
    found = records(out)
    assert len(found) == 3 * 6
    for row in range(6):
        texts = {runner: found[runner, row]["texts"] for runner in ("baseline", "assisted", "exact")}
        assert texts["baseline"] == texts["exact"] == texts["assisted"]
        assert found["exact", row]["stats"]["new_tokens"] == found["baseline", row]["stats"]["new_tokens"]
    for runner in ("assisted", "exact"):
        accepted = sum(found[runner, row]["stats"]["accepted_tokens"] for row in range(6))
        passes = sum(found[runner, row]["stats"]["target_passes"] for row in range(6))
        tokens = sum(found[runner, row]["stats"]["new_tokens"] for row in range(6))
        turns = 9 if task in ("specbench", "dialog") else 6  # tokens after a stop string count as accepted
        assert tokens <= accepted + passes <= tokens + 12 * turns
    saved = Path(f"{out}.md").read_text()
    for name in {
        "specbench": ("log-probability", "multi-turn conversation (3)", "qa (3)"),
        "dialog": ("log-probability",),
        "summarize": ("ROUGE-1", "ROUGE-2", "ROUGE-L"),
        "translate": ("BLEU",),
    }[task]:
        assert name in saved
    assert "acceptance" in saved
    assert "no column sigmoid" in done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 3},
        {"bad_words_ids": [[one] for one in range(100)]},
        {"forced_eos_token_id": 7},
    ],
)
def test_runners_ignore_the_generation_config_of_the_models(
    models: Path, prompts: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for name in ("target", "draft"):
        shutil.copytree(models / name, tmp_path / name)
        config = tmp_path / name / "generation_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    out = tmp_path / "a.jsonl"
    words = "--data", str(prompts), "-m", "12", "-o", str(out), "--limit", "2"
    done = run(tmp_path, "dialog", "-d", str(tmp_path / "draft"), *words)
    assert done.exit_code == 0, done.output
    found = records(out)
    for row in range(2):
        assert found["assisted", row]["texts"] == found["baseline", row]["texts"]


def test_a_stop_string_ends_an_answer_and_its_token_count() -> None:
    tokens = byte_tokenizer()("abc\nde\nf").input_ids
    text, token_ids = cut_at_stop(("\n",), byte_tokenizer(), tokens)
    assert (text, byte_tokenizer().decode(token_ids)) == ("abc", "abc\n")
    assert cut_at_stop((), byte_tokenizer(), tokens) == ("abc\nde\nf", tokens)
    assert cut_at_stop(("x",), byte_tokenizer(), tokens) == ("abc\nde\nf", tokens)


def test_an_impossible_runner_is_left_out(prompts: Path, tmp_path: Path) -> None:
    require_packages("summarize")
    tiny_seq2seq("t5", vocab_size=272).save_pretrained(tmp_path / "target")
    tiny(vocab_size=272).save_pretrained(tmp_path / "draft")
    for name in ("target", "draft"):
        byte_tokenizer().save_pretrained(tmp_path / name)
    out = tmp_path / "out.jsonl"
    words = "-d", str(tmp_path / "draft"), "--data", str(prompts), "-m", "8", "-o", str(out)
    done = run(tmp_path, "summarize", *words)
    assert done.exit_code == 0, done.output
    assert "no column assisted" in done.stderr
    found = records(out)
    assert [found["baseline", row]["texts"] for row in range(6)] == [
        found["exact", row]["texts"] for row in range(6)
    ]


def test_a_runner_that_failed_on_every_row_does_not_empty_the_other_columns() -> None:
    good = {"texts": ["x"], "judged": [{}], "seconds": 1.0, "stats": {"new_tokens": 3, "target_passes": 1}}
    every: dict[tuple[str, int], dict[str, Any]] = {
        ("baseline", 0): good, ("assisted", 0): {"error": "x"}, ("exact", 0): good,
        ("baseline", 1): {"error": "no"}, ("assisted", 1): {"error": "x"}, ("exact", 1): good,
    }  # fmt: skip
    found = table.columns(kinds.TASKS["dialog"], [Item("a"), Item("b")], every, RUNNERS[:3])
    lines = dict(table.table(found))
    assert lines["rows"] == ["1", "0", "1"]
    assert lines["failed"] == ["1", "2", "0"]
    assert lines["tokens/s"] == ["3.0", "–", "3.0"]
    assert table.failures(found, [Item("a"), Item("b")]) == [
        "a (assisted): x", "b (baseline): no", "b (assisted): x"
    ]  # fmt: skip
    assert table.by_category(found) == [("other (1)", ["3.00, 1.00x", "–", "3.00, 1.00x"])]


def test_columns_compare_the_rows_that_all_runners_finished() -> None:
    good = {"texts": ["x"], "judged": [{}], "seconds": 1.0, "stats": {"new_tokens": 3, "target_passes": 1}}
    every: dict[tuple[str, int], dict[str, Any]] = {
        ("baseline", 0): good,
        ("baseline", 1): good,
        ("exact", 0): good,
    }
    found = table.columns(kinds.TASKS["dialog"], [Item("a"), Item("b")], every, ("baseline", "exact"))
    assert dict(table.table(found))["rows"] == ["1", "1"]


def test_a_table_with_only_failed_rows_has_no_measures() -> None:
    every: dict[tuple[str, int], dict[str, Any]] = {(runner, 0): {"error": "x"} for runner in RUNNERS[:3]}
    found = table.columns(kinds.TASKS["specbench"], [Item("a")], every, RUNNERS[:3])
    assert table.table(found) == [("rows", ["0"] * 3), ("failed", ["1"] * 3)]
    assert table.by_category(found) == []


def test_a_row_without_new_tokens_has_no_relative_speed() -> None:
    none = {"texts": [""], "judged": [{}], "seconds": 1.0, "stats": {"new_tokens": 0, "target_passes": 1}}
    every: dict[tuple[str, int], dict[str, Any]] = {(runner, 0): none for runner in ("baseline", "exact")}
    found = table.columns(kinds.TASKS["specbench"], [Item("a")], every, ("baseline", "exact"))
    assert "over baseline" not in dict(table.table(found))
    assert table.by_category(found) == [("other (1)", ["0.00", "0.00"])]


def test_a_row_that_failed_for_lack_of_memory_runs_again(
    models: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    words = "-d", "lookup", "--data", str(prompts), "-m", "4", "-o", str(out), "--runners", "baseline,exact"
    original = OutpaceRunner.generate

    def generate(self: OutpaceRunner, item: Item, seed: int) -> Any:
        if item.name == "r2":
            raise MemoryError("not enough")
        return original(self, item, seed)

    with monkeypatch.context() as patch:
        patch.setattr(OutpaceRunner, "generate", generate)
        done = run(models, "dialog", *words)
    assert done.exit_code == 1
    assert "failed: r2: MemoryError: not enough" in done.stderr
    done = run(models, "dialog", *words)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_steps_are_timed_in_separate_runs_with_profile(tmp_path: Path, temperature: float) -> None:
    """Profile as on a GPU."""
    target, draft = (tiny(vocab_size=272, seed=seed) for seed in (0, 1))
    decoder = Decoder(target, draft, byte_tokenizer(), num_draft_tokens=Fixed(3))
    settings = RunSettings(kinds.TASKS["dialog"], SamplingParams(temperature=temperature), 12)
    evaluation = Evaluation(decoder, None, settings, RUNNERS, seed=1, profile=True)
    rows = [Item(str(i), ["abc"]) for i in range(5)]
    with Journal(tmp_path / "a.jsonl") as journal:
        journal.start({"task": "dialog"}, {})
        evaluation.run(rows, journal)
    found = table.columns(settings.task, rows, journal.records, list(evaluation.runners))
    assert not table.failures(found, rows)
    for column in found:
        assert column.stats.verify_seconds == 0
        if column.runner == "assisted" and not temperature:
            assert column.sampling_step is None  # greedy assisted generation has no sampling step
        else:
            step = column.sampling_step
            assert step is not None
            assert 0 < step < 1000
        profiled = ["sampling_passes" in record for record in column.records]
        assert profiled == [column.sampling_step is not None] * 4 + [False]


def test_each_turn_continues_from_the_answers_before_it(models: Path, prompts: Path, tmp_path: Path) -> None:
    """Without a chat template, the prompt is the concatenation of all turns."""
    from outpace import load

    out = tmp_path / "out.jsonl"
    words = "-d", "none", "--data", str(prompts), "-m", "5", "-o", str(out), "--runners", "baseline"
    run(models, "dialog", *words)
    decoder = load(models / "target", None, dtype="float32", tell=lambda line: None)
    first = decoder.generate("abc", temperature=0, max_new_tokens=5)
    second = decoder.generate(f"abc\n\n{first.text}\n\nde", temperature=0, max_new_tokens=5)
    assert records(out)["baseline", 1]["texts"] == [f"{first.text}\n\n{second.text}"]


def test_distance_from_the_target_is_zero_for_exact_and_large_for_sigmoid(
    models: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = "-d", str(models / "draft"), "--data", str(prompts), "-m", "6", "--temperature", "1"
    done = run(models, "specbench", *words, "--top-k", "20", "-o", str(out), "--num-draft-tokens", "3")
    assert done.exit_code == 0, done.output
    found = records(out)
    assert len(found) == 4 * 6
    every = table.columns(kinds.TASKS["specbench"], [Item("")] * 6, found, RUNNERS)
    columns = {column.runner: column for column in every}
    assert columns["exact"].distance == pytest.approx(0, abs=1e-9)
    sigmoid = columns["sigmoid"].distance
    assert sigmoid is not None
    assert sigmoid > 0.2
    assert (
        columns["sigmoid"].quality["log-probability"] < columns["baseline"].quality["log-probability"] - 0.2
    )
    assert columns["assisted"].stats.verify_seconds > 0
    assert columns["assisted"].distance is None
    assert found["exact", 5].get("positions") is None  # only the first rows are profiled


def test_an_incomplete_file_is_resumed_and_ends_with_the_same_table(
    models: Path, prompts: Path, tmp_path: Path
) -> None:
    flags = ["-d", str(models / "draft"), "--data", str(prompts), "-m", "6", "--temperature", "1"]
    flags += ["--limit", "3", "--runners", "baseline,exact", "-o"]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run(models, "specbench", *flags, str(whole)).exit_code == 0
    lines = whole.read_text().splitlines(keepends=True)
    parts.write_text("".join(lines[:4]) + lines[4][:20])
    assert run(models, "specbench", *flags, str(parts)).exit_code == 0
    assert untimed_lines(Path(f"{parts}.md")) == untimed_lines(Path(f"{whole}.md"))
    texts = {key: record["texts"] for key, record in records(whole).items()}
    assert {key: record["texts"] for key, record in records(parts).items()} == texts


@pytest.mark.full
def test_a_killed_run_resumes_and_ends_with_the_same_table(
    models: Path, prompts: Path, tmp_path: Path
) -> None:
    flags = ["-d", str(models / "draft"), "--data", str(prompts), "-m", "12", "--temperature", "1"]
    flags += ["--limit", "4", "--runners", "baseline,exact,sigmoid", "-o"]
    target = ["-t", str(models / "target"), "--dtype", "float32"]
    command = [sys.executable, "-m", "outpace", "eval", "specbench", *target, *flags]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run(models, "specbench", *flags, str(whole)).exit_code == 0
    for lines in tiers.sized((7,), (2, 7)):  # after the header and one record, and halfway
        one = subprocess.Popen([*command, str(parts)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        hung = threading.Timer(HANG_SECONDS, one.kill)
        hung.start()
        while not parts.exists() or parts.read_bytes().count(b"\n") < lines:
            with pytest.raises(subprocess.TimeoutExpired):  # it still runs
                one.wait(timeout=0.005)
        hung.cancel()
        os.kill(one.pid, signal.SIGKILL)
        one.wait()
        with parts.open("ab") as file:
            file.write(b'{"runner": "exact", "row": 3, "te')  # an incomplete line
    assert run(models, "specbench", *flags, str(parts)).exit_code == 0
    assert untimed_lines(Path(f"{parts}.md")) == untimed_lines(Path(f"{whole}.md"))
    expected, found = records(whole), records(parts)
    assert found.keys() == expected.keys()
    for key, record in expected.items():
        assert found[key]["texts"] == record["texts"]


def test_bad_rows_are_named_and_the_other_rows_are_evaluated(models: Path, tmp_path: Path) -> None:
    require_packages("summarize")
    rows = ['{"id": "good", "source": "abc", "reference": "x"}', "{oops", '{"id": "none"}', "[1]",
            json.dumps({"id": "long", "source": "abc" * 200, "reference": "x"}),
            '{"id": "unknown", "source": "abc"}']  # fmt: skip
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    data.write_text("\n".join(rows) + "\n")
    done = run(models, "summarize", "-d", "lookup", "--data", str(data), "-m", "5", "-o", str(out))
    assert done.exit_code == 1
    notes = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert [line.split(": ")[1] for line in notes] == [
        "rows.jsonl:2",
        "none",
        "rows.jsonl:4",
        "long",
        "unknown",
    ]
    assert "not JSON" in notes[0]
    assert "there is no text" in notes[1]
    assert "context of 256" in notes[3]
    assert "there is no summary" in notes[4]
    saved = Path(f"{out}.md").read_text()
    assert "| rows | 1 | 1 | 1 |" in saved
    assert "| failed | 5 | 5 | 5 |" in saved
    assert "- long: the prompt has" in saved


def test_an_invalid_flag_or_data_file_raises_a_value_error(
    models: Path, prompts: Path, tmp_path: Path
) -> None:
    data = "--data", str(prompts)
    for task, words, message in (
        ("dialog", (*data, "--runners", "fast"), "--runners: got 'fast'"),
        ("dialog", (*data, "--samples", "3"), "--samples"),
        ("dialog", (*data, "--prompt-template", "hello"), "{source}"),
        ("translate", (*data, "--languages", "de"), "like en-de"),
        ("dialog", ("--data", str(tmp_path / "no.jsonl")), "no such file"),
        ("dialog", ("--data", str(tmp_path)), "manifest.jsonl"),
    ):
        error = run(models, task, *words).exception
        assert isinstance(error, ValueError)
        assert message in str(error)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "has no rows" in str(run(models, "dialog", "--data", str(empty)).exception)


def test_generated_programs_run_in_the_sandbox(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that pass, fail, hang and write a file replace the answers of the model."""
    answers = {
        "passes": "    return x + 1\n",
        "fails": "    return x\n",
        "hangs": "    while True: pass\n",
        "writes": "    open('f', 'w').write('x')\n    return x + 1\n",
    }
    row = {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(1) == 2\n", "entry_point": "f"}
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps({"id": name, **row}) + "\n" for name in answers))
    original = kinds.program
    monkeypatch.setattr(kinds, "program", lambda item, text: original(item, answers[item.name]))
    monkeypatch.setattr(sandbox, "run", functools.partial(sandbox.run, seconds=1))
    words = "-d", "lookup", "--data", str(data), "-m", "2", "--samples", "2", "--runners", "baseline"
    done = run(models, "code", *words, "-o", str(out))
    assert done.exit_code == 0, done.output
    saved = Path(f"{out}.md").read_text()
    assert "| pass@1 % | 25.00 |" in saved
    assert "| stopped programs | 4 |\n| failed | 0 |" in saved
    assert "- hangs (baseline): the program took longer than 1 s\n" in saved
    assert "failed: " not in done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    assert {line.split(" ")[1] for line in notes} == {"hangs", "writes"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"test": None}, "there is no test"),
        ({"test": "  "}, "there is no test"),
        ({"test": "assert True"}, "the test defines no function check"),
        ({"entry_point": None}, "there is no entry_point"),
        ({"entry_point": ""}, "there is no entry_point"),
    ],
)
def test_a_row_without_tests_fails(models: Path, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    """An answer with tests of its own fails, too."""
    row = {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(1) == 2\n", "entry_point": "f"}
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row) + "\n" + json.dumps(row | change) + "\n")
    done = run(
        models, "code", "--data", str(data), "-m", "2", "--runners", "baseline", "-o", str(tmp_path / "out")
    )
    assert done.exit_code == 1
    found = records(tmp_path / "out")
    assert "judged" in found["baseline", 0]
    assert why in found["baseline", 1]["error"]


@pytest.mark.parametrize(
    "answer",
    [
        "    return g(x)\n",
        "Here it is:\n```python\ndef f(x):\n    return g(x)\n```\nDone.",
        "```\nimport math\ndef f(x):\n    return g(x)\n```",
        "```python\n    return g(x)\n```",
        "def f(x):\n    return g(x)",
        "    return g(x)\n```\nThis adds one.",
        "```python3\ndef f(x):\n    return g(x)\n```\n",
        "```bash\npip install x\n```\nThen:\n``` python\r\ndef f(x):\r\n    return g(x)\r\n```",
        "```\ndef f(x):\n    return g(x)\nif __name__ == '__main__':\n    raise SystemExit\n",
    ],
)
def test_programs_are_extracted_from_answers(answer: str) -> None:
    before = "def g(x):\n    return x + 1\n\n\ndef f(x):\n    '''One more.'''\n"
    row = Item("a", [before], extra={"test": "def check(f):\n    assert f(1) == 2", "entry_point": "f"})
    space: dict[str, Any] = {}
    exec(kinds.program(row, answer), space)
    assert sandbox.run(kinds.program(row, answer)).passed
    assert space["f"](4) == 5


def test_speech_is_scored_by_word_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_packages("asr")
    import soundfile

    from outpace.tasks.transcribe import Transcriber

    noise = np.random.default_rng(3)
    for name, seconds in (("a", 0.8), ("b", 0.6), ("c", 0.4)):
        soundfile.write(tmp_path / f"{name}.wav", noise.normal(size=int(seconds * RATE)) * 0.1, RATE)
    rows = [{"audio": "a.wav", "text": "red cats"}, {"audio": "b.wav", "text": "dogs"},
            {"audio": "c.wav", "text": ""}, {"audio": "gone.wav", "text": "x"}, {"text": "x"}]  # fmt: skip
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(*arguments: Any, **options: Any) -> Transcriber:
        target, draft = (tiny_whisper(seed, max_target_positions=128) for seed in (0, 1))
        return Transcriber(Decoder(target, draft, num_draft_tokens=Fixed(3)), PROCESSOR)

    monkeypatch.setattr(Transcriber, "load", load)
    out = tmp_path / "out.jsonl"
    words = ["eval", "asr", "--data", str(tmp_path), "-o", str(out), "--language", "en", "-d", "x"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), done.exception
    found = records(out)
    for row in range(2):
        texts = [found[runner, row]["texts"] for runner in ("baseline", "assisted", "exact")]
        assert texts[0] == texts[1] == texts[2] != [""]
        assert found["exact", row]["judged"][0]["words"] == (2, 1)[row]
    assert "no transcript" in found["baseline", 2]["error"]
    assert found["baseline", 3]["error"] == "no such file"
    assert found["baseline", 4]["error"] == "there is no audio"
    assert "WER %" in Path(f"{out}.md").read_text()
    flags = "--runners", "exact,sigmoid", "--limit", "1"
    done = CliRunner().invoke(app, [*words, "--temperature", "1", "--fresh", *flags])
    assert done.exit_code == 0, done.output
    found = records(out)
    assert found["exact", 0]["distance"] < 1e-6
    assert found["sigmoid", 0]["distance"] > 0.2


def test_measures_equal_the_definitions_of_their_papers() -> None:
    require_packages("asr", "summarize", "translate")
    normal = str.lower
    assert score.word_errors("a b c d", "A x c", normal) == {"errors": 2, "words": 4}
    with pytest.raises(ValueError, match="no words"):
        score.word_errors("", "a", normal)
    found = score.rouge("the cat sat on the mat", "the cat lay on a mat")
    assert found["ROUGE-1"] == pytest.approx(100 * 4 / 6)
    assert found["ROUGE-2"] == pytest.approx(100 * 1 / 5)
    assert found["ROUGE-L"] == pytest.approx(100 * 4 / 6)
    assert score.bleu(["the cat sat on the mat"], ["the cat sat on the mat"]) == pytest.approx(100)
    assert score.percentile([3, 1, 2, 4], 0.5) == 2
    assert score.percentile([3, 1, 2, 4], 0.99) == 4
    assert score.percentile([7], 0.9) == 7
    for n, c, k in ((5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 1), (6, 5, 3)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert score.pass_at(k, n, c) == pytest.approx(sum(map(any, subsets)) / math.comb(n, k))


def test_texts_and_references_are_read_from_the_usual_column_names(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"translation": {"en": "yes", "de": "ja"}}) + "\n")
    one = data.read(str(path), languages=("en", "de")).items[0]
    assert (list(one.turns), one.reference) == (["yes"], "ja")
    one = data.read(str(path), languages=("de", "en")).items[0]
    assert (list(one.turns), one.reference) == (["ja"], "yes")
    path.write_text(json.dumps({"text": "an article"}) + "\n")
    assert data.read(str(path)).items[0].reference is None
    path.write_text(json.dumps({"article": "long", "highlights": "short", "id": 3}) + "\n")
    one = data.read(str(path)).items[0]
    assert (one.name, list(one.turns), one.reference) == ("3", ["long"], "short")


def test_hub_data_sets_are_loaded_by_name_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list[Any]):
        def take(self, n: int) -> Rows:
            return Rows(self[:n])

        def cast_column(self, name: str, kind: Any) -> Rows:
            assert (name, kind) == ("audio", "undecoded")
            return self

    requests = []

    def load_dataset(*words: Any, **named: Any) -> Rows:
        requests.append((words, named))
        return Rows([{"text": "hello", "audio": {"bytes": b"RIFF", "path": None}}] * 3)

    library = SimpleNamespace(load_dataset=load_dataset, Audio=lambda decode: "undecoded")
    monkeypatch.setitem(sys.modules, "datasets", library)
    found = data.read("owner/name:clean:validation", speech=True, limit=2).items
    named = {"split": "validation", "streaming": True, "trust_remote_code": False}
    assert requests == [(("owner/name", "clean"), named)]
    assert [one.audio for one in found] == [b"RIFF", b"RIFF"]
    assert found[0].reference == "hello"
    data.read("owner/name:3.0.0", limit=1)
    assert requests[-1][0] == ("owner/name", "3.0.0")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"outpace\[data\]"):
        data.read("owner/name")


RECORD = {"texts": ["x"], "judged": [{}], "seconds": 1.0, "stats": {}}


def test_a_journal_is_locked_and_refuses_other_settings(tmp_path: Path) -> None:
    path, link = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    link.symlink_to(path)
    header = {"task": "code", "settings": {"seed": 1}}
    with Journal(path) as journal:
        assert not path.exists()
        journal.start(header, {})
        journal.add({"runner": "baseline", "row": 0, **RECORD})
        journal.add({"runner": "baseline", "row": 1, "error": "x", "again": True})
        for name in (path, link):
            with pytest.raises(ValueError, match="another run is writing"):
                Journal(name)
    assert not Path(f"{path}.lock").exists()
    before = path.read_bytes()
    with Journal(link) as journal:
        journal.check({"task": "code"})
        journal.start(header, {})
        assert list(journal.records) == [("baseline", 0), ("baseline", 1)]
        assert [journal.has("baseline", row) for row in range(3)] == [True, False, False]
    with Journal(path) as journal, pytest.raises(ValueError, match="seed: 1 there, 2 here"):
        journal.check({"settings": {"seed": 2}})
    with Journal(path, fresh=True) as journal:
        journal.check({"settings": {"seed": 2}})
        assert not journal.records
    assert path.read_bytes() == before  # until a run starts
    with Journal(path, fresh=True) as journal:
        journal.start({"task": "code", "settings": {"seed": 2}}, {})
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize(
    "content", ["dear diary\n", "dear diary", '{"task": "mine"}', '{"a": 1}\n', "[1]\n", "3"]
)
def test_a_foreign_file_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="not a file of `outpace eval`"):
        Journal(path)
    assert path.read_text() == content
    assert not Path(f"{path}.lock").exists()


@pytest.mark.parametrize(
    "end", ['{"runner": "exact", "row": 1, "te', '{"runner": "exact", "row": 1}\n', "\0\0", "x\n"]
)
def test_an_incomplete_last_line_is_dropped(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    whole = (
        json.dumps({"task": "code"}) + "\n" + json.dumps({"runner": "baseline", "row": 0, **RECORD}) + "\n"
    )
    path.write_text(whole + end)
    with Journal(path) as journal:
        assert journal.truncated
        assert list(journal.records) == [("baseline", 0)]
        journal.start({"task": "code"}, {})
    assert path.read_text() == whole
    with Journal(path) as journal:
        assert not journal.truncated


@pytest.mark.parametrize("start", ["{", '{"task": "co'])
def test_an_incomplete_first_line_of_a_journal_starts_a_new_run(tmp_path: Path, start: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(start)
    if start == "{":
        with pytest.raises(ValueError, match="not a file of `outpace eval`"):
            Journal(path)
        return
    with Journal(path) as journal:
        assert journal.truncated
        journal.start({"task": "code"}, {})
    assert path.read_text() == '{"task": "code"}\n'


@pytest.mark.parametrize(
    "line", ["{", '{"runner": "exact", "row": 0}', '{"row": 0, "error": "x"}', "null", ""]
)
def test_the_error_for_a_damaged_line_has_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"runner": "baseline", "row": 0, **RECORD})
    path.write_text("\n".join((json.dumps({"task": "code"}), good, line, good)) + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 3 is damaged; delete it to run its row again, or --fresh"):
        Journal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"row": 2},
        {"row": -1},
        {"row": True},
        {"runner": "other"},
        {"runner": ["baseline"]},
        {"texts": None},
        {"texts": []},
        {"texts": ["x", "y"]},
        {"texts": [1]},
        {"judged": "x"},
        {"judged": [1]},
        {"seconds": "a"},
        {"seconds": None},
        {"stats": {"bogus": 1}},
        {"stats": {"draft_tokens": "a"}},
        {"stats": {"draft_tokens_by_position": 1}},
        {"error": None},
        {"error": ""},
    ],
    ids=json.dumps,
)
def test_the_error_for_an_invalid_record_has_its_line_number(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    good = {"runner": "baseline", "row": 0, **RECORD}
    lines = {"task": "code", "data": {"rows": 2}}, {**good, "row": 1}, {**good, **damage}, good
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="line 3 is damaged; delete it to run its row again, or --fresh"):
        Journal(path)
