"""`Evaluation` on a CUDA device.

pytest -m gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outpace import Decoder, Fixed, SamplingParams
from outpace.bench.data import Item
from outpace.tasks.evaluate import Evaluation
from outpace.tasks.journal import Journal
from outpace.tasks.kinds import RUNNERS, TASKS
from outpace.tasks.runners import RunSettings
from outpace.tasks.table import columns, failures, table
from tests.tiny import byte_tokenizer, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_runners_generate_texts_and_measures(tmp_path: Path, temperature: float) -> None:
    target, draft = (tiny(vocab_size=272, seed=seed).cuda() for seed in (0, 1))
    decoder = Decoder(target, draft, byte_tokenizer(), num_draft_tokens=Fixed(3))
    task = TASKS["dialog"]
    settings = RunSettings(task, SamplingParams(temperature=temperature), 24, with_log_probability=True)
    evaluation = Evaluation(decoder, None, settings, RUNNERS, seed=1)
    rows = [Item(str(i), ["abc", "de"][: 1 + i % 2]) for i in range(4)]
    with Journal(tmp_path / "a.jsonl") as journal:
        journal.start({"task": "dialog"}, {})
        evaluation.run(rows, journal)
    found = columns(task, rows, journal.records, list(evaluation.runners))
    assert not failures(found, rows)
    names = [name for name, _ in table(found)]
    assert "log-probability" in names
    assert "acceptance" in names
    assert "sampling step, ms a pass" in names

    if temperature:
        assert list(evaluation.runners) == list(RUNNERS)
        exact, sigmoid = found[2].distance, found[3].distance
        assert exact == pytest.approx(0, abs=1e-5)
        assert sigmoid is not None
        assert sigmoid > 0.2
    else:
        texts = [[record["texts"] for record in column.records] for column in found]
        assert texts[0] == texts[1] == texts[2]
