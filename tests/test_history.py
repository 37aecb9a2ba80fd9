"""The runs of the past in examples/: they load, fill the clusters they name, and say what was published and what is predicted now."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def history() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_history", ROOT / "docs" / "make_history.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_those_of_the_equations(history: ModuleType) -> None:
    rows = history.rows()
    page = (ROOT / "docs" / "history.md").read_text()
    assert {row.name for row in rows} == {"gpt3-175b", "mt-nlg-530b", "palm-540b", "llama2-70b", "llama3-405b", "deepseek-v3"}
    for row in rows:
        assert row.option.layout.ranks == row.machines.gpus, row.name
        text = (ROOT / "examples" / f"{row.name}.toml").read_text()
        head = re.sub(r"\n# +", " ", text.partition(history.BEGIN)[2].partition(history.END)[0])
        said = re.search(r"Predicted: ([\d.]+) s a step .*?: +([\d.]+) days, .*device-hours, \$", head)
        assert said is not None, f"{row.name}: run `make docs`"
        assert float(said[1]) == pytest.approx(row.option.seconds, rel=0.02), f"{row.name}: run `make docs`"
        assert float(said[2]) == pytest.approx(row.option.expected_days, rel=0.02), f"{row.name}: run `make docs`"
        assert f"{row.days:.1f} days" in head and row.published.said in head, f"{row.name}: run `make docs`"
        assert row.published.title in page and f"| {row.days:.1f} |" in page, "run `make docs`"


def test_published_figures_agree_with_each_other(history: ModuleType) -> None:
    rows = {row.name: row for row in history.rows()}
    assert rows["llama2-70b"].days == pytest.approx(35)
    assert rows["palm-540b"].hours == 8_404_992
    assert rows["gpt3-175b"].days == pytest.approx(34, rel=0.05)  # as its authors estimate
    deepseek = rows["deepseek-v3"]
    assert deepseek.hours / (deepseek.run.train.tokens / 1e12) == pytest.approx(180e3)
    assert deepseek.hours * deepseek.machines.price == pytest.approx(5.328e6)
