"""Configuration files: what is written reads back the same, and errors are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.checks.files import write_atomic
from outpace.tune import config

SETTINGS = {
    "target": 'a "quoted" \\ näme\x7f',
    "draft": "lookup",
    "num_draft_tokens": 4,
    "rule": "token",
    "dtype": None,
    "max_batch": 8,
}
MEASURED = {"speedup": 1.25, "interval": (1.1, 1.4), "machine": {"device": "some", "triton": None}}


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "outpace.toml"
    write_atomic(path, config.to_toml(SETTINGS, MEASURED, "Draft with lookup."))
    assert path.read_text().startswith("# Draft with lookup.\n")
    found = config.read(path)
    assert found == {
        **{name: value for name, value in SETTINGS.items() if value is not None},
        "measured": {"speedup": 1.25, "interval": [1.1, 1.4], "machine": {"device": "some"}},
    }
    assert config.flags(path) == {
        "target": SETTINGS["target"], "draft": "lookup", "num_draft_tokens": "4", "rule": "token",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]


def test_the_path_of_an_ngram_table_is_relative_to_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "outpace.toml"
    path.write_text('draft = "ngram:table.safetensors"')
    assert config.flags(path) == {"draft": f"ngram:{tmp_path / 'table.safetensors'}"}
    path.write_text('draft = "ngram:/elsewhere/table.safetensors"')
    assert config.flags(path) == {"draft": "ngram:/elsewhere/table.safetensors"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_draft_tokens = ", "not a TOML file"),
        ("num_draft_token = 4", "unknown key 'num_draft_token'; known are target, draft, num_draft_tokens"),
        ("num_draft_tokens = 4.5", "num_draft_tokens: got 4.5; it must be a string or a whole number"),
        ("num_draft_tokens = true", "num_draft_tokens: got True; it must be a string or a whole number"),
        ("draft = 1", "draft: got 1; it must be a string"),
        ("max_batch = '8'", "max_batch: got '8'; it must be a whole number"),
        ("measured = 1", "measured: got 1; it must be a table"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "outpace.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="config: ") as caught:
        config.read(path)
    assert message in str(caught.value)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        config.read(tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match="is a folder"):
        config.read(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a TOML file"):
        config.read(tmp_path / "bytes")
