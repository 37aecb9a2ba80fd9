"""`phalanx plan` as it is called: what it says, draws and refuses, and that it says it at once and without torch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.spec.layout import Layout
from phalanx.spec.load import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning.md").read_text()
SMALL = """\
model = "llama3-8b"
[train]
batch = 512
sequence_length = 8192
tokens = 1_000_000_000_000
[cluster]
name = "h100-8"
gpus = 16
"""


@pytest.fixture
def plan(here: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "run.toml").write_text(SMALL)
    return lambda *words: here("plan", "run.toml", *words)


def test_plan_is_printed_drawn_and_json(plan: Callable[..., Any], tmp_path: Path) -> None:
    ended = plan("--png", "plan.png", "--html", "plan.html", "--json")
    assert ended.code == 0 and not ended.complaints, ended
    value = ended.json
    best = value["best"]
    assert best["fits"] and best["bytes"] == pytest.approx(sum(best["memory"].values()))
    assert sum(best["split"].values()) == pytest.approx(best["seconds"], rel=1e-6)
    assert best["low"] < best["seconds"] < best["high"] and best["ranks"] == 16
    assert best["tokens_per_second"] == pytest.approx(512 * 8192 / best["seconds"])
    assert value["others"] and value["why_not"] and value["considered"] > 1000 and value["placement"]["groups"]
    assert best["name"] in ended.err and "P10 – P90" in ended.err and "runners-up" in ended.err and "assumed" in ended.err
    assert max(len(line) for line in ended.err.splitlines()) <= 100
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "plan.html").read_text()
    assert best["name"] in page and "32 devices" in page  # the curve of price against days has twice as many
    assert [option["ranks"] for option in value["scaling"]] == [4, 8, 16, 32, 64]


def test_pasted_layout_gives_the_same_plan(plan: Callable[..., Any], tmp_path: Path) -> None:
    best = plan("--json").json["best"]
    table = tomllib.loads(best["toml"])
    words = [f"{name}.{key}={json.dumps(value)}" for name, keys in table.items() for key, value in keys.items()]
    again = plan(*words, "--given", "--json").json
    assert again["best"]["layout"] == best["layout"] and again["best"]["seconds"] == pytest.approx(best["seconds"])
    assert again["best"]["bytes"] == pytest.approx(best["bytes"]) and again["others"] == []
    assert load(tmp_path / "run.toml", words).layout == Layout(**best["layout"])


def test_plan_limits_apply_to_a_given_layout(plan: Callable[..., Any]) -> None:
    own = plan("layout.tensor=4", "layout.data=4", "--given", "--json").json["best"]
    less = plan("layout.tensor=4", "layout.data=4", "--given", "--fits-in", f"{own['bytes'] / 2**20 - 1}MiB", "--json").json[
        "best"
    ]
    assert own["fits"] and less["capacity"] < own["bytes"] and (less["bytes"] < own["bytes"] or not less["fits"])
    late = plan("layout.tensor=4", "layout.data=4", "--given", "--deadline", "1s")
    assert late.code == 2 and "more than the deadline" in late.err


def test_plan_given_and_free(plan: Callable[..., Any]) -> None:
    kept = plan("layout.tensor=4", "--json").json
    assert kept["best"]["layout"]["tensor"] == 4
    free = plan("layout.tensor=4", "layout.data=4", "--free", "--json").json
    assert free["best"]["seconds"] < kept["best"]["seconds"] and free["why_not"][0]["name"] == "the run file's"
    assert "TP4" in free["why_not"][0]["reason"]


def test_plan_limits_choose_and_refuse(plan: Callable[..., Any]) -> None:
    tight = plan("--fits-in", "30GiB", "--json").json["best"]
    assert tight["bytes"] <= tight["capacity"] == 30 * 2**30
    cheap, quick = (plan("cluster.gpus=4", "--aim", aim, "--json").json["best"] for aim in ("price", "time"))
    assert cheap["price"] <= quick["price"] and cheap["expected_days"] >= quick["expected_days"]
    late = plan("--deadline", "1h", "--budget", "$5", "--json")
    assert late.code == 2 and len(late.json["error"]) == 2 and "deadline of 0.0 days" in late.err and "budget of $5" in late.err


def test_plan_that_does_not_fit_names_remedies(plan: Callable[..., Any]) -> None:
    ended = plan("model.preset=llama3-405b", "cluster.gpus=8", "--json")
    assert ended.code == 2
    missing, *changes = ended.json["error"]
    assert "Nothing fits on 8 ×" in missing and "GiB" in missing and len(changes) == 3


def test_plan_solve(plan: Callable[..., Any]) -> None:
    ended = plan("--solve", "gpus", "--json")
    answer = ended.json
    assert answer["what"] == "gpus" and 1 <= answer["value"] <= 16
    assert answer["plan"]["best"]["fits"] and answer["plan"]["best"]["ranks"] == answer["value"]
    assert ended.shown.startswith(answer["sentence"][:60]) and "With twice the devices" in ended.shown
    assert {change["name"] for change in answer["what_if"]} >= {"twice the devices", "half the network"}


def test_plan_compare_and_refit(
    here: Callable[..., Any], finished: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    run = finished(1)
    ended = here("plan", "--compare", run.path, "--refit", "--json")
    assert ended.code == 0, ended
    rows = {row["name"]: row for row in ended.json["rows"]}
    assert rows["step"]["measured"] > 0 and rows["parameters"]["predicted"] == rows["parameters"]["measured"]
    assert "predicted" in ended.shown and "measured" in ended.shown
    # With the corrected constants the same run is promised as it was measured.
    assert ended.json["seconds"] == pytest.approx(rows["step"]["measured"], rel=0.05)
    assert Path(ended.json["file"]).is_relative_to(tmp_path) and "[cpu]" in Path(ended.json["file"]).read_text()
    again = here("plan", "--compare", run.path, "--json").json["rows"][0]
    assert again["predicted"] == pytest.approx(ended.json["seconds"], rel=0.01)
    assert here("plan", "--compare", tmp_path).code == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "phalanx plan needs a run file, such as `phalanx plan run.toml`"),
        (["run.toml", "--compare", "runs/x"], "--compare runs/x reads the run file of that run: remove run.toml."),
        (["run.toml", "--refit"], "--refit stores what a run measured: name its directory with --compare."),
        (["run.toml", "--given", "--free"], "--given does not search, but --free does: use one of them."),
        (["--compare", "runs/x", "--free"], "--compare shows a finished run: --free does not apply."),
        (["run.toml", "--solve", "gpus", "--png", "a.png"], "--solve prints an answer: --png draws a plan"),
        (["run.toml", "--fits-in", "80"], '--fits-in "80" has no unit: write it like 80GiB or 80GB'),
        (["run.toml", "--deadline", "soon"], '--deadline "soon" is not an amount: write it like 30d or 12h.'),
        (["run.toml", "--budget", "2 euro"], '--budget "2 euro" has the unit euro'),
        (["run.toml", "cluster.name=h1000"], "h1000"),
        (["run.toml", "--png", "nowhere/a.png"], "nowhere/a.png: cannot be written: there is no folder nowhere"),
    ],
)
def test_plan_refuses_invalid_options(here: Callable[..., Any], tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    ended = here("plan", *words)
    assert ended.code == 2 and sentence in ended.err, ended


def test_api_explain_equals_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    text = px.explain(px.load(tmp_path / "run.toml"))
    assert "llama3-8b" in text and "why this one" in text and "[layout]" in text


def test_plan_of_16384_gpus_does_not_import_torch() -> None:
    """And it rules out nearly all layouts without looking at each. Counted, not timed: machines differ, and may be busy."""
    program = (
        "import sys\n"
        "sys.argv = ['phalanx', 'plan', 'examples/llama3-405b.toml', '--free']\n"
        "from phalanx.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d,]+) legal layouts evaluated, ([\d,]+) of them one by one", done.stdout)
    assert found is not None, done.stdout
    legal, one_by_one = (int(number.replace(",", "")) for number in found.groups())
    assert legal > 50_000_000 and one_by_one < legal / 200


@pytest.mark.slow
@pytest.mark.parametrize("line", re.findall(r"^    phalanx (plan examples/[^#\n]*)", PAGE, re.M))
def test_commands_on_the_plan_page_run(here: Callable[..., Any], tmp_path: Path, line: str) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ended = here(*shlex.split(line))
    assert ended.code == 0 and "P10 – P90" in ended.shown, ended


def test_plan_for_this_machine_equals_training(here: Callable[..., Any]) -> None:
    file = ROOT / "examples" / "quickstart.toml"
    told = here("plan", str(file), "--json").json
    taken = px.plan(load(file, []))
    assert told["best"]["layout"]["data"] == 4 and taken.layout == Layout(data=4)
    assert taken.promise is not None and told["best"]["seconds"] == pytest.approx(taken.promise.seconds)
    quicker = [one for one in told["others"] if one["seconds"] < told["best"]["seconds"]]
    assert not quicker or "replicas are kept" in told["why_not"][0]["reason"]
