"""`outpace bench` without a GPU: every method is timed, and no CUDA graph is captured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outpace.bench import engine
from outpace.bench.machine import machine
from tests.cli.conftest import Run

PEER = "def verify(draft_tokens, draft_logits, target_logits):\n    return target_logits.argmax(-1)\n"


def test_kernel_times_every_method_and_writes_the_results(run: Run, tmp_path: Path) -> None:
    (tmp_path / "argmax.py").write_text(PEER)
    out = tmp_path / "figures.json"
    sizes = ("--vocab", "300", "--num-draft-tokens", "2", "--batch", "1", "--batch", "16")
    options = ("--device", "cpu", "--dtype", "float32", "--peers", str(tmp_path), "--out", str(out))
    status, table, errors = run("bench", "kernel", *sizes, *options)
    assert status == 0, errors
    report = json.loads(out.read_text())
    methods = [(one["method"], one["B"]) for one in report["figures"]]
    assert methods == [
        *(("outpace", 1), ("outpace eager", 1), ("transformers", 1), ("argmax", 1)),
        *(("outpace", 16), ("outpace eager", 16), ("argmax", 16)),
    ]
    assert all(one["eager"] > 0 and one["graph_cold"] is None for one in report["figures"])
    assert report["command"].startswith("outpace bench kernel")
    assert "argmax" in table


def test_kernel_times_filtered_logits(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PEER)
    (tmp_path / "both.py").write_text(PEER + PEER.replace("verify", "verify_filtered"))
    out = tmp_path / "figures.json"
    sizes = ("--vocab", "300", "--num-draft-tokens", "2", "--batch", "1", "--filtered")
    options = ("--device", "cpu", "--dtype", "float32", "--peers", str(tmp_path), "--out", str(out))
    status, _, errors = run("bench", "kernel", *sizes, *options)
    assert status == 0, errors
    methods = [one["method"] for one in json.loads(out.read_text())["figures"]]
    assert methods == ["outpace", "outpace eager", "transformers", "both"]


def test_a_folder_without_peers_is_one_line_of_error(run: Run, tmp_path: Path) -> None:
    status, _, errors = run("bench", "kernel", "--device", "cpu", "--peers", str(tmp_path))
    assert status == 2
    assert errors.strip() == f"outpace: peers: no Python file in {tmp_path}"


def test_profile_times_the_sampling_step_and_writes_the_results(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "profile.json"
    sizes = ("--vocab", "300", "--num-draft-tokens", "1", "--num-draft-tokens", "2")
    status, table, errors = run("bench", "profile", *sizes, "--device", "cpu", "-o", str(out))
    assert status == 0, errors
    report = json.loads(out.read_text())
    methods = ["transformers", "exact", "drop-in", "sigmoid"]
    assert [(one["g"], one["method"]) for one in report["figures"]] == [
        (g, method) for g in (1, 2) for method in methods
    ]
    assert [one["method"] for one in report["bounds"]] == methods
    rules = ["token", *(f"sigmoid(-{scale}, {scale})" for scale in (10, 1000, 10000, 100000))]
    assert [one["rule"] for one in report["scaling"]] == rules
    in_use = {one["rule"]: one["quality"] for one in report["figures"]}
    assert in_use == {one["rule"]: one["quality"] for one in report["scaling"] if one["rule"] in in_use}
    assert report["command"] == f"outpace bench profile {' '.join(sizes)} --device cpu -o profile.json"
    assert report["machine"]["torch"] == torch.__version__
    assert all(method in table for method in methods)
    assert all(rule in table for rule in rules)


@pytest.mark.parametrize("command", ["kernel", "profile"])
@pytest.mark.parametrize(
    ("flag", "value", "line"),
    [
        ("--device", "xpu", "--device: got 'xpu'; it must be auto, cpu or cuda"),
        (
            "--dtype",
            "int8",
            '--dtype: got \'int8\'; it must be "float32", "bfloat16" or "float16" '
            "(fp32, float, bf16, fp16, half)",
        ),
    ],
)
def test_a_wrong_flag_is_one_line_of_error(run: Run, command: str, flag: str, value: str, line: str) -> None:
    status, _, errors = run("bench", command, flag, value)
    assert status == 2
    assert errors.startswith(f"outpace: {line}")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("command", ["kernel", "profile", "engine"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    run: Run, tmp_path: Path, command: str
) -> None:
    assert run("bench", command, "--out", str(tmp_path)) == (
        2,
        "",
        f"outpace: --out: {tmp_path} is a folder\n",
    )
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "new" / "out.json")
    assert run("bench", command, "--out", inside)[::2] == (
        2,
        f"outpace: --out: {tmp_path / 'file' / 'new'}: it cannot be written\n",
    )


def test_engine_refuses_an_output_file_of_another_command(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    for text in ("", "[1]", '{"kind": "sweep"}'):
        out.write_text(text)
        code, _, err = run("bench", "engine", "--device", "cpu", "--out", str(out))
        assert (code, err) == (2, f"outpace: --out: {out}: it was not written by `outpace bench engine`\n")
        assert out.read_text() == text


def test_engine_does_not_measure_figures_again_that_are_in_the_file(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    methods = (("transformers", 0), ("transformers static", 0), ("transformers assisted", 5))
    known = [
        {
            "method": method,
            "name": "qwen2-7b/0.5b",
            "alpha": 0.8 if g else 0.0,
            "g": g,
            "B": 1,
            "context": 128,
            "tokens_per_second": 10.0 + i,
        }
        for i, (method, g) in enumerate((*methods, ("outpace baseline", 0), ("outpace", 5)))
    ]
    here = machine(torch.device("cpu"))
    before = {"command": "before", "machine": here, "dtype": "bfloat16", "figures": known}
    out.write_text(json.dumps(before))
    status, table, errors = run(
        "bench", "engine", "--pair", "qwen2-7b/0.5b", "--device", "cpu", "--out", str(out)
    )
    assert status == 0, errors
    assert [one["tokens_per_second"] for one in json.loads(out.read_text())["figures"]] == [
        10,
        11,
        12,
        13,
        14,
    ]
    assert "outpace baseline" in table
    status, _, errors = run("bench", "engine", "--device", "cpu", "--dtype", "float32", "--out", str(out))
    assert status == 2
    assert "another machine, version or dtype" in errors


def test_engine_file_names_all_commands_that_measured_its_figures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "engine.json"
    commands = []
    for g in ("3", "5", "5"):
        figure = engine.Throughput("outpace", "llama2-7b/1.3b", 0.8, int(g), 1, 128, 10.0)
        monkeypatch.setattr(engine, "measure", lambda *arguments, one=figure: [one])
        words = (
            "bench",
            "engine",
            "--pair",
            "llama2-7b/1.3b",
            "--num-draft-tokens",
            g,
            "--device",
            "cpu",
            "--out",
        )
        assert run(*words, str(out))[0] == 0
        commands.append(" ".join(("outpace", *words, "engine.json")))
    report = json.loads(out.read_text())
    assert report["command"] == "; ".join(commands[:2])
    assert len(report["figures"]) == 2


def test_ctrl_c_is_one_line_and_saves_the_figures_so_far(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object) -> Iterator[engine.Throughput]:
        yield engine.Throughput("outpace", "llama2-7b/1.3b", 0.8, 5, 1, 128, 10.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "measure", measure)
    out = tmp_path / "engine.json"
    status, _, errors = run("bench", "engine", "--device", "cpu", "--out", str(out))
    assert status == 130
    assert errors.strip() == "outpace: interrupted"
    assert [one["method"] for one in json.loads(out.read_text())["figures"]] == ["outpace"]


def test_an_unknown_pair_is_one_line_of_error(run: Run) -> None:
    status, _, errors = run("bench", "engine", "--pair", "gpt5/gpt4", "--device", "cpu")
    assert status == 2
    assert errors.startswith("outpace: --pair: got 'gpt5/gpt4'; there are llama2-7b/1.3b")


def test_the_same_file_for_results_and_plot_is_refused(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, link = tmp_path / "a.svg", tmp_path / "b.svg"
    link.symlink_to(picture)
    code, _, errors = run("bench", "engine", "--out", str(picture), "--plot", str(link))
    assert code == 2
    assert errors == f"outpace: --plot: {link} is the file of --out, too; name another file\n"
