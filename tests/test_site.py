"""The first hour as the documentation tells it: the README, the tutorial and the how-to pages from a wheel, in a new environment; the pages of the site."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import hf_models
import hub_server
import pytest
import small_tokenizers
import yaml
from doc_scripts import script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
OUTPUTS = script("make_outputs")
HOW_TO = sorted(page for page in (DOCS / "how-to").glob("*.md") if page.name != "index.md")


def pages(nav: list[object]) -> list[str]:
    found: list[str] = []
    for entry in nav:
        assert isinstance(entry, dict)
        for value in entry.values():
            found += [value] if isinstance(value, str) else pages(value)
    return found


def test_the_site_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(nav)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_ten_how_to_pages_say_who_wants_what_and_what_to_read_next() -> None:
    index = (DOCS / "how-to" / "index.md").read_text()
    assert len(HOW_TO) == 10
    for page in HOW_TO:
        text = page.read_text()
        assert re.match(r"# .+\n\n\*You .+\*\n\n", text), f"{page.name} does not begin with who wants what"
        assert re.search(r"^\*\*Next\.\*\* .*\]\(", text, re.M), f"{page.name} does not say what to read next"
        assert len(OUTPUTS.blocks(page)) >= 3 and f"({page.name})" in index, page.name


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs `pip install 'phalanx[site]'`")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an announcement of the theme, not about these pages
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
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
    environment |= {"PATH": f"{place / 'bin'}:{environment['PATH']}", **OUTPUTS.ENVIRONMENT}
    where = subprocess.run(
        [python, "-c", "import phalanx; print(phalanx.__file__)"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(place)), where
    return environment


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which the hub is one of this test: its model of that name is tiny and random, with a tokenizer for chats."""
    pytest.importorskip("huggingface_hub")
    folder = tmp_path_factory.mktemp("hub")
    hf_models.save(folder / "model", "qwen3", vocab_size=384)
    small_tokenizers.save_bpe(folder / "model", template=small_tokenizers.CHATML, eos="<|im_end|>")
    with hub_server.serve() as hub:
        hub.add("Qwen/Qwen3-0.6B", folder / "model")
        variables = hub.environment(folder / "cache")
        yield {name: value for name, value in variables.items() if name.startswith("HF_")}


@pytest.mark.slow
@pytest.mark.parametrize("page", [DOCS / "tutorial.md", *HOW_TO], ids=lambda page: page.name)
def test_a_page_prints_what_it_shows(page: Path, installed: dict[str, str], hub: dict[str, str], tmp_path: Path) -> None:
    """All commands in order, each with exit code 0. Numbers may differ, words may not."""
    for shown, now in OUTPUTS.followed(page, tmp_path, installed | hub):
        assert now == shown, "run `make outputs`"


@pytest.mark.slow
def test_the_commands_of_the_readme_run(installed: dict[str, str], tmp_path: Path) -> None:
    """In a clone, from top to bottom. Commands that are shown with an output are compared by tests/test_docs.py."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", README, re.M | re.S)).splitlines()
    install, *commands = (re.split(r"\s+#", line)[0] for line in lines)
    assert install == "pip install ."  # the fixture has done it
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=600)
        assert command.startswith("phalanx ") and done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
def test_the_python_of_a_first_page_runs(page: Path, installed: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    done = subprocess.run(["python", "-c", program], cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Step(" in done.stdout and "def " in done.stdout, done.stdout


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
