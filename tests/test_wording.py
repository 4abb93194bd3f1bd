from __future__ import annotations

from outpace.wording import counted, suggestion, too_few


def test_one_is_not_many() -> None:
    assert [counted(n, "prompt") for n in (0, 1, 2)] == ["0 prompts", "1 prompt", "2 prompts"]
    assert [too_few(n, "prompt") for n in (1, 2)] == ["1 prompt is too few", "2 prompts are too few"]


def test_only_a_misspelling_of_a_known_name_is_suggested() -> None:
    assert suggestion("lokup", ("lookup", "none")) == '; did you mean "lookup"?'
    assert suggestion("org/model", ("lookup", "none")) == ""
