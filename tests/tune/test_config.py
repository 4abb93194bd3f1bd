"""What is written is read again, and what is wrong is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.checks.files import write_whole
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


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "outpace.toml"
    write_whole(path, config.written(SETTINGS, MEASURED, "Draft with lookup."))
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


def test_a_table_lies_beside_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "outpace.toml"
    path.write_text('draft = "ngram:table.safetensors"')
    assert config.flags(path) == {"draft": f"ngram:{tmp_path / 'table.safetensors'}"}
    path.write_text('draft = "ngram:/elsewhere/table.safetensors"')
    assert config.flags(path) == {"draft": "ngram:/elsewhere/table.safetensors"}


@pytest.mark.parametrize(
    ("text", "why"),
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
def test_what_is_wrong_is_said(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "outpace.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="config: ") as caught:
        config.read(path)
    assert why in str(caught.value)


def test_a_file_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        config.read(tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match="is a folder"):
        config.read(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a TOML file"):
        config.read(tmp_path / "bytes")
