"""The documentation site: `sphinx-build -W docs build/docs`."""

from __future__ import annotations

import os
from pathlib import Path

from sphinx.application import Sphinx

import outpace

project = "outpace"
copyright = "the authors of outpace"
version = release = outpace.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "outpace"
exclude_patterns = []
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"

COMMANDS = [
    *("generate", "chat", "transcribe", "audit", "tune", "plan", "doctor", "eval", "report"),
    *(f"bench {name}" for name in ("alpha", "sweep", "kernel", "profile", "engine")),
]


def write_help(app: Sphinx) -> None:
    """Write what every command says about itself, as one page."""
    os.environ.update({"COLUMNS": "88", "TERMINAL_WIDTH": "88", "NO_COLOR": "1"})  # typer reads them once
    from typer.testing import CliRunner

    from outpace.cli import app as commands

    parts = ["# Help of every command\n"]
    for name in COMMANDS:
        done = CliRunner().invoke(commands, [*name.split(), "--help"], prog_name="outpace")
        if done.exit_code:
            raise RuntimeError(f"outpace {name} --help failed: {done.output}")
        parts.append(f"## outpace {name}\n\n```text\n{done.output.strip()}\n```\n")
    Path(app.srcdir, "reference", "help.md").write_text("\n".join(parts), encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_help)
