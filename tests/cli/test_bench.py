"""`outpace bench kernel` where there is no GPU: every side is timed, nothing is captured."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run

PEER = "def verify(draft_tokens, draft_logits, target_logits):\n    return target_logits.argmax(-1)\n"


def test_every_side_is_timed_and_written_down(run: Run, tmp_path: Path) -> None:
    (tmp_path / "argmax.py").write_text(PEER)
    out = tmp_path / "figures.json"
    sizes = ("--vocab", "300", "--drafts", "2", "--batch", "1", "--batch", "16")
    options = ("--device", "cpu", "--dtype", "float32", "--peers", str(tmp_path), "--out", str(out))
    status, table, errors = run("bench", "kernel", *sizes, *options)
    assert status == 0, errors
    report = json.loads(out.read_text())
    sides = [(one["side"], one["B"]) for one in report["figures"]]
    assert sides == [
        *(("outpace", 1), ("outpace eager", 1), ("transformers", 1), ("argmax", 1)),
        *(("outpace", 16), ("outpace eager", 16), ("argmax", 16)),
    ]
    assert all(one["eager"] > 0 and one["graph_cold"] is None for one in report["figures"])
    assert report["command"].startswith("outpace bench kernel")
    assert "argmax" in table


def test_a_folder_without_peers_is_one_line(run: Run, tmp_path: Path) -> None:
    status, _, errors = run("bench", "kernel", "--device", "cpu", "--peers", str(tmp_path))
    assert status == 2
    assert errors.strip() == f"outpace: peers: no Python file in {tmp_path}"
