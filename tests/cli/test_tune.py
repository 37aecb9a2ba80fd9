"""`phalanx tune` with real trainers of a tiny model: a planted slow setting is beaten, and what is written trains as it was measured."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import RUN, Ended, InProcess, Workshop

from phalanx.planning.planner import choose
from phalanx.spec.load import load
from phalanx.spec.plan import Machine

SLOW = ("train.batch=14", "cluster.cpu_ranks=2")
MACHINE = Machine(host="h", cpu="a CPU", cores=2, memory=64 << 30, core_flops=1e11)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ended, Path]]:
    """A run of two ranks that compute their seven sequences one by one, tuned: only all at once divides them, too."""
    shop = Workshop(tmp_path_factory.mktemp("tune") / "workshop")
    file = shop.path / "tiny.toml"
    file.write_text(RUN.replace("micro_batch = 2", "micro_batch = 1  # on purpose"))
    options = ("--only", "train.micro_batch", "--minutes", 5, "-o", "better.toml", "--no-learn", "--json")
    ended = shop.run("tune", "tiny.toml", *SLOW, *options)
    yield ended, shop.path
    assert not shop.processes()
    shop.close()


@pytest.mark.slow
def test_a_planted_slow_setting_is_beaten(tuned: tuple[Ended, Path]) -> None:
    ended, _ = tuned
    assert ended.code == 0, ended
    found = ended.json
    assert found["changed"] and found["keys"]["train.micro_batch"] == 7, ended
    assert found["confirmation"]["faster"] and found["confirmation"]["high"] < 1
    assert found["confirmation"]["median"] < 0.9, "most of the time of such a small step is overhead of a micro-batch"
    assert "less time a step than the defaults" in ended.shown and "phalanx train better.toml train.batch=14" in ended.shown


@pytest.mark.slow
def test_the_tuned_file_is_the_run_file_with_the_key_and_what_it_brought(tuned: tuple[Ended, Path]) -> None:
    ended, folder = tuned
    value = ended.json["keys"]["train.micro_batch"]
    before, after = (folder / "tiny.toml").read_text(), (folder / "better.toml").read_text()
    (line,) = set(after.splitlines()) - set(before.splitlines())
    assert line.startswith(f"micro_batch = {value} # tune: ") and line.endswith("less time a step")
    plan = choose(load(folder / "better.toml", SLOW), MACHINE)
    assert (plan.micro_batch, plan.ranks) == (value, 2), "it trains as it was measured"


@pytest.mark.slow
def test_every_measurement_is_in_the_table(tuned: tuple[Ended, Path]) -> None:
    ended, folder = tuned
    rows = list(csv.DictReader((folder / "tune/tiny/trials.csv").read_text().splitlines()))
    report = json.loads((folder / "tune/tiny/report.json").read_text())
    first = report["trials"][0]
    assert report["keys"] == ended.json["keys"] and first["outcome"] == "kept"
    own = [row for row in rows if row["trial"] == "1" and row["stage"] == "repeat"]
    times = {role: [float(row["seconds"]) for row in own if row["role"] == role] for role in ("base", "candidate")}
    assert len(times["base"]) == len(times["candidate"]) == first["ratio"]["pairs"]
    straight = statistics.median(times["candidate"]) / statistics.median(times["base"])
    assert straight == pytest.approx(first["ratio"]["median"], rel=0.25), "another statistic of the same turns"
    assert all(float(row["seconds"]) > 0 for row in rows) and {row["setting"] for row in rows} >= {"defaults"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--only", "optimizer.learning_rate"), "optimizer.learning_rate is not a key that tune varies"),
        (("--vary", "train.batch"), "train.batch is not a key that tune varies"),
        (("-o", "nowhere/tuned.toml"), "there is no folder nowhere"),
        (("layout.tensor=2", "--ranks", 3), "a replica of the run's [layout] has 2 ranks"),
        (("layout.data=4096", "train.batch=4096", "train.micro_batch=1"), "give --ranks"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    here: InProcess, tmp_path: Path, words: tuple[object, ...], sentence: str
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("some words " * 500)
    (tmp_path / "tiny.toml").write_text(RUN)
    ended = here("tune", "tiny.toml", *words)
    assert ended.code == 2 and sentence in ended.err and not (tmp_path / "tune").exists()


def test_a_program_of_its_own_is_not_tuned(here: InProcess, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[command]\nprogram = ["python", "train.py"]\n')
    ended = here("tune", "own.toml")
    assert ended.code == 2 and "[command] names a program of its own" in ended.err
