"""A real Ray cluster of several raylets, in namespaces of its own: Ray's own tools would end every Ray process of the machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import available
from xla_engine import needs_xla

from phalanx.events.log import read_events
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Recovered, Restored, Step, Stopped, Warned

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not available(), reason="needs root and network namespaces"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]

Losses = dict[int, tuple[float, int | None]]
STEPS = 900  # Ray takes 14 s to give up a lost node, and only then another can take its place

RUN = """
[model]
dim = 64
layers = 2
heads = 2
kv_heads = 2
[train]
batch = 4
micro_batch = 1
sequence_length = 64
steps = {steps}
[layout]
data = 2
[cluster]
threads = 1
device = "cpu"
nodes = {nodes}
[resilience]
spares = {spares}
"""

DRIVER = Path(__file__).parents[1] / "ray_driver.py"
TRAIN = [sys.executable, "-m", "phalanx", "train", "run.toml", "--on", "ray", "--run-dir", "run"]


def alone(folder: Path, *command: object) -> str:
    """Run a command in namespaces of its own; returns what it prints."""
    own = 'ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; exec "$@"'
    prefix = ["unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child", "sh", "-c", own, "sh"]
    done = subprocess.run(
        [*prefix, *map(str, command)], cwd=folder, env=os.environ, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def train(folder: Path, *settings: str, nodes: int, spares: int, fault: str, steps: int = STEPS) -> tuple[list[Event], str]:
    folder.mkdir()
    (folder / "run.toml").write_text(RUN.format(steps=steps, nodes=nodes, spares=spares))
    printed = alone(folder, sys.executable, DRIVER, nodes, 20, fault, *TRAIN, *settings)
    return read_events(folder / "run/events.jsonl"), printed


def losses(events: list[Event]) -> Losses:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


def test_any_program_runs_on_ray(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples/launch_ddp.py"
    launch = [sys.executable, "-m", "phalanx", "launch", "--run-dir", "run", "--nodes", "2"]
    program = ["--", sys.executable, script, "--steps", "30"]
    calm = tmp_path / "calm"
    for folder, command in ((calm, launch), (tmp_path / "ray", [sys.executable, DRIVER, 2, 0, "none", *launch, "--on", "ray"])):
        folder.mkdir()
        alone(folder, *command, *program)
    logs = [(folder / "run/logs/rank-0.log").read_text() for folder in (calm, tmp_path / "ray")]
    steps = [[line for line in log.splitlines() if line.startswith("step ")] for log in logs]
    assert steps[0] == steps[1] and len(steps[0]) == 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Losses]:
    @functools.cache
    def run(steps: int) -> Losses:
        folder = tmp_path_factory.mktemp("alone")
        (folder / "run.toml").write_text(RUN.format(steps=steps, nodes=1, spares=0))
        command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--run-dir", "run"]
        subprocess.run(command, cwd=folder, env=os.environ, check=True, capture_output=True)
        return losses(read_events(folder / "run/events.jsonl"))

    return run


def recoveries(events: list[Event]) -> list[Recovered]:
    found = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} from {event.source} at step {event.step} in {event.seconds:.1f} s" for event in found))
    return found


def test_spare_replaces_a_killed_raylet(tmp_path: Path, undisturbed: Callable[[int], Losses]) -> None:
    events, _ = train(tmp_path / "ray", nodes=3, spares=1, fault="raylet")
    assert losses(events) == undisturbed(STEPS)
    (failure,) = (event for event in events if isinstance(event, FailureNoticed))
    (recovered,) = recoveries(events)
    assert (failure.cause, recovered.action) == ("node lost", "spare") and recovered.steps_lost <= 1


def test_run_shrinks_and_grows_with_the_cluster(tmp_path: Path, undisturbed: Callable[[int], Losses]) -> None:
    events, _ = train(tmp_path / "ray", nodes=2, spares=0, fault="raylet")
    ours, others = losses(events), undisturbed(STEPS)
    assert ours.keys() == others.keys() and max(abs(ours[step][0] - others[step][0]) for step in ours) <= 1e-5
    assert [event.action for event in recoveries(events)] == ["shrink", "grow"]
    assert any(isinstance(event, FailureNoticed) for event in events)
    assert len([event for event in events if isinstance(event, ControllerChanged)]) <= 1


def test_killed_worker_is_started_again(tmp_path: Path, undisturbed: Callable[[int], Losses]) -> None:
    events, _ = train(tmp_path / "ray", nodes=2, spares=0, fault="worker", steps=300)
    assert losses(events) == undisturbed(300)
    (failure,) = (event for event in events if isinstance(event, FailureNoticed))
    (recovered,) = recoveries(events)
    assert (failure.cause, failure.rank, recovered.action) == ("died", 1, "restart") and recovered.steps_lost <= 1


@needs_xla
def test_killed_process_of_the_xla_engine_is_started_again(tmp_path: Path, undisturbed: Callable[[int], Losses]) -> None:
    events, _ = train(tmp_path / "ray", "engine.name=xla", nodes=2, spares=0, fault="worker", steps=40)
    ours, others = losses(events), undisturbed(40)
    assert ours.keys() == others.keys() and max(abs(ours[step][0] - others[step][0]) for step in ours) <= 1e-5
    assert {step: digest for step, (_, digest) in ours.items()} == {step: digest for step, (_, digest) in others.items()}
    (failure,) = (event for event in events if isinstance(event, FailureNoticed))
    (recovered,) = recoveries(events)
    assert (failure.cause, failure.rank, recovered.action) == ("died", 1, "restart") and recovered.steps_lost <= 1


def test_run_leaves_a_node_that_ray_drains(tmp_path: Path, undisturbed: Callable[[int], Losses]) -> None:
    events, printed = train(tmp_path / "ray", nodes=3, spares=1, fault="drain", steps=300)
    assert losses(events) == undisturbed(300)
    assert any(isinstance(event, Warned) and "Ray drains it" in event.message for event in events)
    assert not any(isinstance(event, FailureNoticed) for event in events)
    (recovered,) = recoveries(events)
    assert (recovered.action, recovered.source, recovered.steps_lost) == ("spare", "live", 0)
    assert "the drained raylet has ended by itself" in printed, "its node is idle"


TRAINER = """
import sys
import ray
from phalanx.ray import PhalanxTrainer
tables = {
    "model": {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2},
    "train": {"batch": 4, "micro_batch": 1, "sequence_length": 64, "steps": 40},
    "layout": {"data": 2},
    "cluster": {"threads": 1, "device": "cpu", "nodes": 2},
}
seen, names = [], set()
def watch(event):
    seen.append(event)
    if not names:
        names.update(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
        names.update(group["name"] for group in ray.util.placement_group_table().values())
ray.init("auto", log_to_driver=False)
result = PhalanxTrainer(tables, run_dir="run", on_event=watch).fit()
assert names == {"phalanx run", "phalanx run node 0", "phalanx run node 1"}, names
assert result.error is None and not result.stopped and str(result.path) == "run"
assert result.metrics["step"] == 40 and result.checkpoint.endswith("step-00000040"), result
assert any(type(event).__name__ == "Step" for event in seen)
while ray.available_resources().get("CPU") != 2:  # the nodes are given back
    pass
failed = PhalanxTrainer(tables | {"resilience": {"max_skipped": 0}, "optimizer": {"learning_rate": 1e30}}, run_dir="failed").fit()
assert failed.error is not None and failed.metrics["step"] < 40, failed
print("loss", result.metrics["loss"])
"""


def test_trainer_for_programs_that_use_ray(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TRAINER)
    printed = alone(tmp_path, sys.executable, DRIVER, 2, -1, "none", sys.executable, "program.py")
    steps = losses(read_events(tmp_path / "run/events.jsonl"))
    assert printed.splitlines()[-1] == f"loss {steps[40][0]}"


def test_plan_for_the_nodes_of_ray(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(steps=5, nodes=2, spares=0))
    plan = [sys.executable, "-m", "phalanx", "plan", "run.toml", "--on", "ray"]
    printed = alone(tmp_path, sys.executable, DRIVER, 2, -1, "none", *plan)
    assert "Ray has 2 usable nodes with 1 cores and" in printed and "planned for 2." in printed


JOB = """
set -e
ray() { python -m ray.scripts.scripts "$@"; }
train="python -m phalanx train $PWD/run.toml --on ray --run-dir $PWD/run"
export RAY_JOB_STOP_WAIT_TIME_S=120  # after 3 seconds Ray would kill a job that still saves, on a busy machine
ray start --head --num-cpus=2 --disable-usage-stats --object-store-memory=100000000
export RAY_ADDRESS=http://127.0.0.1:8265
ray job submit --submission-id=first --no-wait -- $train
until grep -s '"step": 30,' run/events.jsonl; do sleep 0.2; done
ray job stop first
ray job logs first | tail -1
ray job submit --submission-id=second -- $train
"""


@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="jobs need the package ray[default]")
def test_submitted_job_is_stopped_saved_and_resumed(tmp_path: Path, undisturbed: Callable[[int], Losses]) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(steps=300, nodes=1, spares=0))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = alone(tmp_path, "env", f"PATH={path}", "bash", "-c", JOB)
    assert "Job 'first' was stopped" in printed and "Stopped and saved." in printed and "Job 'second' succeeded" in printed
    events = read_events(tmp_path / "run/events.jsonl")
    stopped = next(event for event in events if isinstance(event, Stopped))
    restored = next(event for event in events if isinstance(event, Restored))
    assert (stopped.reason, restored.step) == ("SIGTERM", stopped.step)
    assert losses(events) == undisturbed(300)
