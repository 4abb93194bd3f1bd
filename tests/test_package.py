"""The import, the version and the command of the README."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import outpace

ROOT = Path(__file__).parents[1]


def test_import_is_lazy() -> None:
    code = (
        "import sys, outpace; dir(outpace); outpace.__version__;"
        "print([name for name in ('torch', 'numpy', 'transformers', 'triton') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_verify_does_not_import_models() -> None:
    code = (
        "import sys, outpace; outpace.verify; outpace.SamplingParams(); print('transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_every_public_name_exists() -> None:
    for name in outpace.__all__:
        assert getattr(outpace, name) is not None
    assert sorted(outpace.__all__) == dir(outpace)


def test_version_equals_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == outpace.__version__


def test_ci_runs_the_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## Develop")[1]
    command = re.search(r"```sh\n(.+?)\n```", section, re.DOTALL)
    assert command is not None
    assert command.group(1) in (ROOT / ".ci" / "run").read_text()


@pytest.mark.full
def test_the_wheel_builds_from_the_source_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("outpace-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    packaged = {
        str(file.relative_to(source)) for file in source.rglob("*") if file.suffix in (".py", ".html", ".css")
    }
    assert packaged <= names
    assert {"outpace/py.typed"} <= names
