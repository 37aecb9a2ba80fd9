"""The first hour as the documentation tells it: the tutorial from a wheel, in a new environment; the ten commands of "How to"; the pages of the site."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)


def readme_outputs() -> ModuleType:
    spec = spec_from_file_location("make_readme", DOCS / "make_readme.py")
    assert spec is not None and spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def pages(nav: list[object]) -> list[str]:
    found: list[str] = []
    for entry in nav:
        assert isinstance(entry, dict)
        for value in entry.values():
            found += [value] if isinstance(value, str) else pages(value)
    return found


def test_the_site_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(nav)) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs `pip install 'phalanx[site]'`")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").exists()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the wheel of this tree, far from it; what Phalanx depends on is taken from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".git", ".venv", "runs", "site", "build", "__pycache__", "*.egg-info"),
        symlinks=True,
    )
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(pip, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    place = folder / "environment"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=600)
    (packages,) = place.glob("lib/python*/site-packages")
    # Its own packages come first, so that it is the wheel's Phalanx and not an editable one.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PATH": f"{place / 'bin'}:{environment['PATH']}", "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    where = subprocess.run(
        [python, "-c", "import phalanx; print(phalanx.__file__)"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(place)), where
    return environment


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(installed: dict[str, str], tmp_path: Path) -> None:
    """All commands in order. Numbers may differ, words may not."""
    outputs = readme_outputs()
    blocks = [block for block in _BLOCK.findall((DOCS / "tutorial.md").read_text()) if block.startswith("$ ")]
    assert len(blocks) >= 6
    for block in blocks:
        command, shown = _command_and_output(block)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=installed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, (command, done.stdout)
        if shown:
            found = outputs.excerpt(shown, [line.rstrip() for line in done.stdout.splitlines()])
            assert found is not None, (command, done.stdout)
            assert [outputs.masked(line) for line in found] == [outputs.masked(line) for line in shown], command


def _command_and_output(block: str) -> tuple[str, list[str]]:
    lines = block.removeprefix("$ ").splitlines()
    quotes, end = 0, 0
    for end, line in enumerate(lines, start=1):  # noqa: B007
        quotes += line.count('"')
        if quotes % 2 == 0:
            break
    return "\n".join(lines[:end]), lines[end:]


@pytest.mark.slow
def test_the_notebook_trains_plots_verifies_and_generates(tmp_path: Path) -> None:
    """In a real kernel, in which other threads run from the start."""
    nbformat = pytest.importorskip("nbformat", reason="needs `pip install nbclient ipykernel`")
    nbclient = pytest.importorskip("nbclient", reason="needs `pip install nbclient ipykernel`")
    pytest.importorskip("ipykernel", reason="needs `pip install nbclient ipykernel`")
    notebook = nbformat.read(ROOT / "examples" / "first_hour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [
        "".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"
    ]
    assert printed[1].startswith("30 steps, loss 5."), printed
    assert printed[3].strip() == "passed" and printed[4].startswith("def "), printed
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.slow
def test_every_how_to_runs(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(
            "The ranks of a phalanx stand side by side, and each protects the next. " * 300
        )
    page = (DOCS / "how-to.md").read_text()
    assert len(re.findall(r"^## ", page, re.M)) == 10
    for command in (line for block in _BLOCK.findall(page) for line in block.splitlines()):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
