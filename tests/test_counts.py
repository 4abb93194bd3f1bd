from __future__ import annotations

from outpace.counts import counted, too_few


def test_one_is_not_many() -> None:
    assert [counted(n, "prompt") for n in (0, 1, 2)] == ["0 prompts", "1 prompt", "2 prompts"]
    assert [too_few(n, "prompt") for n in (1, 2)] == ["1 prompt is too few", "2 prompts are too few"]
