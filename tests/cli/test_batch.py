"""``outpace generate --input``: a file of requests becomes a file of results."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outpace import SamplingParams
from outpace.decoder import Decoder
from outpace.engine.scheduler import Scheduler
from tests.cli.conftest import CHAT, Run, interrupted
from tests.tiny import byte_tokenizer, tiny


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Batch:
    """Files of a batch in a folder, and the command that runs it."""

    def __init__(self, run: Run, model: str, folder: Path) -> None:
        self.run, self.model = run, model
        self.input, self.output = folder / "prompts.jsonl", folder / "out.jsonl"

    def write(self, *requests: Any) -> None:
        """Write the input. Strings that start with ! are lines as they are."""
        lines = [
            one[1:] if isinstance(one, str) and one.startswith("!") else json.dumps(one) for one in requests
        ]
        self.input.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def words(self, *flags: str) -> list[str]:
        files = "--input", str(self.input), "--output", str(self.output)
        return [*files, "--target", self.model, "--dtype", "float32", "--device", "cpu", "-m", "8", *flags]

    def __call__(self, *flags: str) -> tuple[int, str]:
        """Run the command, and return exit status and stderr."""
        code, out, err = self.run("generate", *self.words(*flags))
        assert out == ""
        return code, err

    def results(self) -> dict[Any, dict[str, Any]]:
        """Return the results by id."""
        found = [json.loads(line) for line in self.output.read_text(encoding="utf-8").splitlines()]
        by_id = {one.get("custom_id", one["id"]): one for one in found}
        assert len(by_id) == len(found)
        return by_id


@pytest.fixture
def batch(run: Run, model: str, tmp_path: Path) -> Batch:
    return Batch(run, model, tmp_path)


def decoder() -> Decoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return Decoder(tiny(vocab_size=272), None, tokenizer)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def openai(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", **body}}


# Plain lines


def test_each_line_gets_the_text_that_it_gets_alone(batch: Batch) -> None:
    batch.write(
        "ab ab",
        {"prompt": "first", "id": "a"},
        {"messages": chat("second"), "id": 7, "max_new_tokens": 3},
        {"prompt": "third", "max_tokens": 5, "temperature": 0.7, "top_k": 5, "seed": 3},
        {"prompt": [1, 2, 3], "stop": ["never"], "logprobs": 2, "id": None},
    )
    code, err = batch("--batch-size", "2")
    assert code == 0
    assert "5 requests | 32 tokens | " in err
    alone = decoder()
    expected = {
        "line-1": alone.generate(chat("ab ab"), max_new_tokens=8),
        "a": alone.generate(chat("first"), max_new_tokens=8),
        7: alone.generate(chat("second"), max_new_tokens=3),
        "line-4": alone.generate(chat("third"), temperature=0.7, top_k=5, seed=3, max_new_tokens=5),
        "line-5": alone.generate([1, 2, 3], max_new_tokens=8, logprobs=2),
    }
    results = batch.results()
    assert results.keys() == expected.keys()
    for key, out in expected.items():
        assert results[key]["text"] == out.text
        assert results[key]["token_ids"] == out.token_ids
        assert results[key]["finish_reason"] == out.finish_reason
        assert results[key]["usage"]["completion_tokens"] == len(out.token_ids)
    assert results["a"]["usage"] == {
        "prompt_tokens": len(alone.encode(chat("first"))),
        "completion_tokens": 8,
        "total_tokens": len(alone.encode(chat("first"))) + 8,
    }
    assert "logprobs" not in results["a"]
    assert results["line-5"]["logprobs"] == pytest.approx(expected["line-5"].logprobs, abs=1e-4)
    top = expected["line-5"].top_logprobs
    assert top is not None
    assert [[int(key) for key in one] for one in results["line-5"]["top_logprobs"]] == [
        list(one) for one in top
    ]


def test_flags_are_the_defaults_of_lines(batch: Batch) -> None:
    batch.write(
        {"prompt": "first", "id": "flags"},
        {"prompt": "first", "id": "own", "temperature": 0, "logit_bias": {"5": -3}, "stop": None},
        {"messages": [{"role": "system", "content": "t"}, *chat("first")], "id": "system"},
    )
    flags = "--temperature", "0.5", "--top-k", "9", "--seed", "4", "--system", "s", "--ignore-eos"
    assert batch(*flags)[0] == 0
    alone, results = decoder(), batch.results()
    system = [{"role": "system", "content": "s"}]
    sampling = SamplingParams(temperature=0.5, top_k=9)
    for key, messages, params in (
        ("flags", system + chat("first"), sampling),
        ("own", system + chat("first"), SamplingParams(temperature=0, top_k=9, logit_bias={5: -3.0})),
        ("system", [{"role": "system", "content": "t"}, *chat("first")], sampling),
    ):
        out = alone.generate(messages, params, seed=4, max_new_tokens=8)
        assert results[key]["text"] == out.text


def test_raw_prompts_have_no_chat_template(batch: Batch) -> None:
    batch.write("ab ab", {"messages": chat("ab ab")})
    assert batch("--raw")[0] == 0
    alone, results = decoder(), batch.results()
    assert results["line-1"]["text"] == alone.generate("ab ab", max_new_tokens=8).text
    assert results["line-2"]["text"] == alone.generate(chat("ab ab"), max_new_tokens=8).text


def test_blank_lines_and_a_byte_order_mark_are_ignored(batch: Batch) -> None:
    batch.input.write_bytes(b'\xef\xbb\xbf"first"\r\n\n  \n{"prompt": "last"}')
    assert batch()[0] == 0
    assert set(batch.results()) == {"line-1", "line-4"}


# Lines of the OpenAI batch format


def test_chat_completions_have_the_form_of_openai(batch: Batch) -> None:
    parts = [{"type": "text", "text": "fi"}, {"type": "text", "text": "rst"}]
    batch.write(
        openai("a", messages=chat("first"), max_completion_tokens=5, logprobs=True, top_logprobs=2, n=1),
        openai("b", messages=[{"role": "user", "content": parts}], max_tokens=3, stop="never", stream=False),
    )
    assert batch()[0] == 0
    results, out = batch.results(), decoder().generate(chat("first"), max_new_tokens=5, logprobs=2)
    assert results["a"].keys() == {"id", "custom_id", "response", "error"}
    assert results["a"]["error"] is None
    response = results["a"]["response"]
    assert response["status_code"] == 200
    body = response["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == Path(batch.model).name
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": out.text}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5
    content = choice["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx(out.logprobs, abs=1e-4)
    assert [len(one["top_logprobs"]) for one in content] == [2] * 5
    assert content[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    second = results["b"]["response"]["body"]["choices"][0]
    assert second["logprobs"] is None
    assert second["message"]["content"] == decoder().generate(chat("first"), max_new_tokens=3).text


def test_completions_have_the_form_of_openai(batch: Batch) -> None:
    batch.write(
        openai("a", "/v1/completions", prompt="first", max_tokens=5, logprobs=2, temperature=0),
        openai("b", "/v1/completions", prompt=[5, 6, 7], max_tokens=4),
    )
    assert batch()[0] == 0
    results, out = batch.results(), decoder().generate("first", max_new_tokens=5, logprobs=2, temperature=0)
    body = results["a"]["response"]["body"]
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert choice["text"] == out.text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(out.logprobs, abs=1e-4)
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 5
    assert all(1 <= len(one) <= 2 for one in choice["logprobs"]["top_logprobs"])  # of equal texts, one
    assert results["b"]["response"]["body"]["choices"][0]["text"] == (
        decoder().generate([5, 6, 7], max_new_tokens=4).text
    )


def test_every_line_is_valid_json_even_if_tokens_cannot_be_sampled(batch: Batch) -> None:
    batch.write({"prompt": "first", "temperature": 1.0, "top_k": 1, "logprobs": 3})
    assert batch()[0] == 0
    assert "Infinity" not in batch.output.read_text()
    assert [len(one) for one in batch.results()["line-1"]["top_logprobs"]] == [1] * 8


# Failures

WRONG: list[tuple[Any, str]] = [
    ("!{not json", "not JSON"),
    (5, "request: got int 5; it must be a string or an object"),
    ({"id": "x"}, "prompt: missing; a request has a prompt or messages"),
    ({"prompt": "a", "messages": chat("b")}, "prompt: got it together with messages"),
    ({"prompt": 5}, "prompt: got int 5; it must be a string or token ids"),
    ({"prompt": ""}, "prompt: it is empty"),
    ({"prompt": "a" * 400}, "it must be less than the model's context of 128 tokens"),
    ({"prompt": "a", "temprature": 1}, 'temprature: no such field; did you mean "temperature"?'),
    ({"prompt": "a", "temperature": -1}, "temperature: got -1; it must be 0"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens: got 0; it must be an int >= 1"),
    ({"prompt": "a", "max_tokens": 4, "max_new_tokens": 4}, "max_tokens: got it together with max_new_"),
    ({"prompt": "a", "stop": [["b"]]}, "stop: got"),
    ({"prompt": "a", "seed": [3]}, "seed: got list [3]; it must be an int"),
    ({"prompt": "a", "logprobs": 300}, "logprobs: got 300; it must be True, False, or an int"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: got str 'x'"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids: got none"),
    ({"prompt": "a", "allowed_token_ids": [3, 999]}, "allowed_token_ids: got token ids [999]"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias: got token ids [999]"),
    ({"prompt": "a", "id": [1]}, "id: got list [1]; it must be a string or an int"),
    ({"messages": ["a"]}, "messages: got list ['a']; it must be a list of messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]: got"),
    (openai("x", "/v1/embeddings", input="a"), "url: got '/v1/embeddings'; it must be"),
    (openai("x", messages=chat("a"), n=2), "n: got 2; it must be 1"),
    (openai("x", messages=chat("a"), stream=True), "stream: got True; it must be False"),
    (openai("x", messages=chat("a"), tools=[{"type": "function"}]), "tools: got"),
    (openai("x", messages=chat("a"), logprobs=3), "logprobs: got int 3; it must be True or False"),
    (openai("x", messages=chat("a"), top_logprobs=3), "top_logprobs: got 3 without logprobs"),
    (openai("x", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0]: got a part"),
    (openai("x", "/v1/completions", prompt=["a", "b"]), "prompt: got list ['a', 'b']; it must be a string"),
    (openai("x") | {"body": 5}, "body: got int 5; it must be an object"),
    (openai("x", messages=chat("a")) | {"method": "GET"}, "method: got 'GET'; it must be \"POST\""),
    ({"custom_id": 5, "body": {}}, "custom_id: got int 5; it must be a string"),
]


def test_a_wrong_line_fails_alone(batch: Batch) -> None:
    batch.write("first", *(line for line, _ in WRONG), openai("last", messages=chat("last")))
    code, err = batch()
    assert code == 1
    wrong = len(WRONG)
    assert f"{wrong} of {wrong + 2} requests failed; the first one: line-2: not JSON" in err
    lines = [json.loads(line) for line in batch.output.read_text().splitlines()]
    assert len(lines) == wrong + 2
    found = [one for one in lines if one.get("error")]
    assert len(found) == wrong
    for (line, message), one in zip(WRONG, found, strict=True):
        if isinstance(line, dict) and "body" in line:
            assert one.keys() == {"id", "custom_id", "response", "error"}
            assert one["response"] is None
            assert message in one["error"]["message"]
        else:
            assert one.keys() == {"id", "error"}
            assert message in one["error"]
    good = [one for one in lines if not one.get("error")]
    assert {one.get("custom_id", one["id"]) for one in good} == {"line-1", "last"}


def test_a_second_request_of_an_id_fails(batch: Batch) -> None:
    batch.write({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}, {"prompt": "c", "id": "line-4"}, "d")
    for _ in range(2):
        assert batch()[0] == 1
        results = batch.results()
        assert set(results) == {"x", "line-2", "line-3", "line-4"}
        assert results["line-2"]["error"] == "id: got 'x', the id of line 1, too; each request needs its own"
        assert results["line-3"]["error"] == "id: got 'line-4'; this is the id of a line without one"
        assert results["line-4"]["text"] == decoder().generate(chat("d"), max_new_tokens=8).text
        assert results["x"]["text"] == decoder().generate(chat("a"), max_new_tokens=8).text


def test_a_request_that_fails_in_generation_fails_alone(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch.write("first", {"prompt": "x" * 60, "id": "long"}, "last")
    original = Decoder.__init__

    def small(self: Decoder, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **{**options, "kv_cache_bytes": 20_000})

    monkeypatch.setattr(Decoder, "__init__", small)
    code, _ = batch()
    assert code == 1
    results = batch.results()
    assert "the KV cache of" in results["long"]["error"]
    assert len(results["line-1"]["token_ids"]) == 8


# Resuming


def test_a_second_run_does_only_what_is_missing(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.write("first", {"prompt": "second", "id": "b"}, openai("c", messages=chat("third")), {"id": "d"})
    assert batch()[0] == 1
    before = batch.output.read_text().splitlines(keepends=True)
    kept = [line for line in before if '"b"' not in line and '"d"' not in line]
    batch.output.write_text("".join(kept) + '{"id": "b", "text": "hal')
    batch.write(
        "first", {"prompt": "second", "id": "b"}, openai("c", messages=chat("third")),
        {"id": "d", "prompt": "now it is right"},
    )  # fmt: skip
    code, err = batch()
    assert code == 0
    assert f"{batch.output}: its last line is incomplete; that request runs again" in err
    assert f"{batch.output} has 2 results; resuming" in err
    assert "2 requests | " in err
    after = batch.output.read_text().splitlines(keepends=True)
    assert after[:2] == kept
    assert set(batch.results()) == {"line-1", "b", "c", "d"}
    code, err = batch()
    assert (code, batch.output.read_text().splitlines(keepends=True)) == (0, after)
    assert f"{batch.output} has all 4 results" in err
    assert "float32 on cpu" not in err  # no model was loaded


def test_failed_requests_run_again_and_leave_no_second_line(batch: Batch) -> None:
    batch.write("first", {"prompt": "a", "top_p": 7})
    assert batch()[0] == 1
    code, err = batch()
    assert code == 1
    assert f"{batch.output} has 1 result; resuming (1 failed request runs again)" in err
    assert set(batch.results()) == {"line-1", "line-2"}
    assert "error" in batch.results()["line-2"]


@pytest.mark.parametrize("text", ["hello\n", '"first"\n', '{"text": "a"}\n', '{"id": [1]}\n', "{}\n"])
def test_a_file_of_something_else_is_not_changed(batch: Batch, text: str) -> None:
    batch.write("first")
    batch.output.write_text(text)
    code, err = batch()
    assert code == 2
    assert f"--output: {batch.output}: line 1 is no result of this command; name another file" in err
    assert batch.output.read_text() == text


def test_ctrl_c_leaves_complete_lines_and_says_how_to_continue(batch: Batch) -> None:
    batch.write(*[{"prompt": "first", "max_tokens": 3 + i} for i in range(60)])
    slow = (
        "import time\nfrom outpace.engine.scheduler import Scheduler\nstep = Scheduler.step\n"
        "def slow(self):\n    time.sleep(0.05)\n    return step(self)\nScheduler.step = slow\n"
    )
    words = ["generate", *batch.words("--batch-size", "1")]
    code, out, err = interrupted(
        words, lambda: batch.output.exists() and batch.output.read_bytes().count(b"\n") >= 3, slow
    )
    assert (code, out) == (130, "")
    found = len(batch.results())
    assert 3 <= found < 60
    assert f"{batch.output} has {found} results; the same command continues" in err
    assert batch.output.read_text().endswith("\n")
    code, err = batch()
    assert code == 0
    assert len(batch.results()) == 60


# The loop


def test_lines_are_read_as_slots_become_free(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    most, add = list[int](), Scheduler.add

    def counted(self: Scheduler, request: Any) -> int:
        index = add(self, request)
        most.append(self.unfinished)
        return index

    monkeypatch.setattr(Scheduler, "add", counted)
    batch.write(*["ab"] * 30)
    assert batch("--batch-size", "3")[0] == 0
    assert len(most) == 30
    assert max(most) <= 6
    assert len(batch.results()) == 30


def test_results_are_written_as_they_finish(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    written, step = list[int](), Scheduler.step

    def counted(self: Scheduler) -> Any:
        written.append(batch.output.read_bytes().count(b"\n"))
        return step(self)

    monkeypatch.setattr(Scheduler, "step", counted)
    batch.write({"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 30})
    assert batch()[0] == 0
    assert 1 in written


def test_a_terminal_shows_progress(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    batch.write(*["ab"] * 5)
    assert batch()[0] == 0
    shown = terminal.getvalue()
    assert "5/5" in shown
    assert "tokens/s" in shown


# Flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json"], "--json: not with --input"),
        (["--svg", "a.svg"], "--svg: not with --input"),
        (["--compare"], "--compare: not with --input"),
        (["--marks"], "--marks: not with --input"),
        (["--no-color"], "--no-color: not with --input"),
        (["--n", "2"], "--n: not with --input"),
        (["--file", "a.txt"], "--file: not with --input"),
        (["a prompt"], "prompt: not with --input"),
        (["--raw", "--system", "s"], "--raw: a raw prompt has no system message"),
        (["--batch-size", "0"], "--batch-size"),
    ],
)
def test_flags_that_make_no_sense_are_refused(batch: Batch, flags: Sequence[str], message: str) -> None:
    batch.write("first")
    code, err = batch(*flags)
    assert code == 2
    assert message in err
    assert not batch.output.exists()


def test_files_are_checked_before_a_model_is_loaded(
    batch: Batch, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.loading.load", lambda *_, **__: pytest.fail("a model was loaded"))
    batch.write("first")
    source, missing = str(batch.input), tmp_path / "no"
    for words, message in (
        (["--input", source], "--input: needs --output, a file for the results"),
        (["--output", "a"], "--output: needs --input, a file of requests"),
        (["--batch-size", "4"], "--batch-size: needs --input, a file of requests"),
        (["--input", str(missing), "--output", "a"], f"--input: {missing}: no such file"),
        (["--input", str(tmp_path), "--output", "a"], f"--input: {tmp_path} is a folder"),
        (["--input", source, "--output", source], f"--output: {source} is the file of --input, too"),
        (["--input", source, "--output", str(tmp_path)], f"--output: {tmp_path} is a folder"),
        (["--input", source, "--output", str(missing / "a")], f"--output: {missing}: no such folder"),
    ):
        code, out, err = run("generate", *words)
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1


def test_an_empty_input_is_refused(batch: Batch) -> None:
    batch.input.write_text("\n")
    code, err = batch()
    assert code == 2
    assert f"--input: {batch.input} has no requests" in err
