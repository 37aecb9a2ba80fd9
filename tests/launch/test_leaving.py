"""A node that is told to go away, with real agents and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.control.protocol import RESUMABLE, AgentSettings, Leave
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Recovered, Step, Stopped, Warned, WorkerStarted
from phalanx.launch.job import Job
from phalanx.launch.launcher import StartedAgent
from phalanx.launch.local import Local
from phalanx.launch.prepare import Request, prepare
from phalanx.spec.load import loads
from phalanx.spec.run import Run

RUN = """
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 2
[train]
batch = 4
micro_batch = 1
sequence_length = 32
steps = 60
[layout]
data = 2
[cluster]
threads = 1
nodes = {nodes}
[resilience]
spares = {spares}
"""


class Leaving(Local):
    """Keeps the agents, so that a test can talk to them."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.agents: dict[int, StartedAgent] = {}

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        self.agents[settings.node] = super().start(settings, log)
        return self.agents[settings.node]


def train(folder: Path, *, nodes: int, spares: int, leave: int | None) -> tuple[int | None, list[Event], Leaving]:
    run = loads(RUN.format(nodes=nodes, spares=spares))
    launcher = Leaving(run)
    job, events = Job(prepare(run, "run", Request(directory=folder), started_by=launcher)), []
    for event in job.events():
        events.append(event)
        if isinstance(event, Step) and event.step == 5 and leave is not None:
            launcher.agents[leave].send(Leave(reason="maintenance", seconds=60.0))
    return job.exit_code, events, launcher


def losses(events: list[Event]) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in events if isinstance(event, Step)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return train(tmp_path_factory.mktemp("alone") / "run", nodes=1, spares=0, leave=None)[1]


@pytest.mark.parametrize("node", [pytest.param(0, id="controller"), pytest.param(1, id="other", marks=pytest.mark.slow)])
def test_spare_takes_the_place_of_a_leaving_node(tmp_path: Path, undisturbed: list[Event], node: int) -> None:
    code, events, launcher = train(tmp_path / "run", nodes=3, spares=1, leave=node)
    assert code == 0 and losses(events) == losses(undisturbed), "every step once, and as without the move"
    assert [event.message for event in events if isinstance(event, Warned)] == [f"Node {node} goes away: maintenance"]
    assert not any(isinstance(event, FailureNoticed) for event in events)
    (recovered,) = (event for event in events if isinstance(event, Recovered))
    assert (recovered.action, recovered.source, recovered.steps_lost) == ("spare", "live", 0)
    assert any(isinstance(event, ControllerChanged) for event in events) == (node == 0)
    assert launcher.agents[node].poll() == 0
    end = next(index for index, event in enumerate(events) if isinstance(event, Recovered))
    assert not any(isinstance(event, WorkerStarted) for event in events[end:])


def test_run_that_needs_a_leaving_node_saves_and_ends(tmp_path: Path) -> None:
    code, events, _ = train(tmp_path / "run", nodes=1, spares=0, leave=0)
    (stopped,) = (event for event in events if isinstance(event, Stopped))
    assert code == RESUMABLE and stopped.reason.startswith("node 0 goes away")
    assert (tmp_path / f"run/checkpoints/step-{stopped.step:08d}/commit.json").exists()
