from __future__ import annotations

from outpace.checks.errors import counted, format_small, suggestion, too_few


def test_nouns_have_a_plural_unless_the_number_is_one() -> None:
    assert [counted(n, "prompt") for n in (0, 1, 2)] == ["0 prompts", "1 prompt", "2 prompts"]
    assert [too_few(n, "prompt") for n in (1, 2)] == ["1 prompt is too few", "2 prompts are too few"]


def test_only_a_misspelling_of_a_known_name_is_suggested() -> None:
    assert suggestion("lokup", ("lookup", "none")) == '; did you mean "lookup"?'
    assert suggestion("org/model", ("lookup", "none")) == ""


def test_a_small_number_has_two_significant_digits_and_no_exponent() -> None:
    assert [format_small(one) for one in (0.5, 0.0932, 0.0042, 6.8e-5, 0.0)] == [
        "0.500", "0.093", "0.0042", "0.000068", "0",
    ]  # fmt: skip
