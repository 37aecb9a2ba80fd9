"""What the pods of a run share through the API, with the agents' side of the registry, against a server that can be cut off."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from kube_server import KubeServer

from phalanx.control.launcher_registry import LauncherRegistry
from phalanx.control.protocol import RESUMABLE, AgentSettings, LogText, NodeInfo, Outcome
from phalanx.events.log import read_events
from phalanx.events.records import FailureNoticed, Recovered, Warned, encode
from phalanx.events.rundir import RunDir
from phalanx.launch import kube_rendezvous
from phalanx.launch.kube_api import KubeApi
from phalanx.launch.kube_rendezvous import KubeRendezvous
from phalanx.spec.errors import RunError

HEARTBEAT = 1.0
SOON = 60.0  # seconds that a busy machine may take
SETTINGS = AgentSettings(
    run_dir="/run", launch="run-1", files={}, registry="launcher", nodes=2, slots=1, token="secret", bind="", chaos="", environment={}, parent=None
)  # fmt: skip


class Pod:
    """A pod with its agent's registry. Like a controller, the agent touches only while it leads."""

    def __init__(self, server: KubeServer, folder: Path, node: int):
        self.name, self.node = f"{node}-x", node
        self.rundir = RunDir(folder / f"pod-{node}")
        api = KubeApi(server.url, server.namespace)
        self.meeting = KubeRendezvous(api, "run", f"pod-{node}", self.rundir, shared=False)
        self.agent = LauncherRegistry(self.meeting.handle, HEARTBEAT)
        server.put(("v1", "pods", f"pod-{node}"), {"metadata": {"name": f"pod-{node}"}, "status": {"phase": "Running"}})

    def start(self) -> None:
        self.meeting.follow(replace(SETTINGS, node=self.node), HEARTBEAT)
        self.agent.announce(self.node, NodeInfo(name=self.name, address=["10.0.0.1", self.node], pid=1))

    def pump(self) -> None:
        for message in self.meeting.messages():
            self.agent.receive(message)
        term, author = self.agent.newest()
        if author == self.name and self.agent.holds(term, author):
            self.agent.touch(self.node)


class Pods:
    def __init__(self, server: KubeServer, folder: Path, count: int):
        self.all = [Pod(server, folder, node) for node in range(count)]

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < deadline
            for pod in self.all:
                pod.pump()
            await asyncio.sleep(0.02)

    async def claim(self, pod: Pod, term: int) -> bool:
        claiming = asyncio.ensure_future(pod.agent.claim(term, pod.name))
        await self.until(claiming.done)
        return claiming.result()


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with closing(KubeServer()) as server:
        server.put(("v1", "secrets", "run"), {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "run"}, "data": {}})
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "run"},
            "spec": {"leaseTransitions": 0},
        }
        server.put(("coordination.k8s.io/v1", "leases", "run"), lease)
        yield server


def test_settings_reach_the_pods_and_the_end_those_that_come_late(tmp_path: Path, server: KubeServer) -> None:
    first, second = (Pod(server, tmp_path, node).meeting for node in range(2))
    assert first.over() is None and first.settings() is None
    found: list[AgentSettings | None] = []
    waiting = threading.Thread(target=lambda: found.append(second.wait_for_settings(SOON)))
    waiting.start()
    server.down = True  # the watch breaks, and node 0 cannot publish
    server.end_watches()
    publishing = threading.Thread(target=first.publish, args=(SETTINGS,))
    publishing.start()
    time.sleep(0.2)
    server.down = False
    publishing.join(SOON)
    waiting.join(SOON)
    assert found == [SETTINGS] and first.settings() == SETTINGS
    assert "secret" not in json.dumps(server.objects[("v1", "secrets", "run")]), "encoded, as Kubernetes wants it"
    first.finish(SETTINGS, Outcome(code=RESUMABLE))
    assert second.settings() is None and second.over() is None, "pods that start now prepare the run anew"
    again = replace(SETTINGS, token="another")
    first.publish(again)
    second.finish(SETTINGS, Outcome(code=RESUMABLE))
    assert first.settings() == again, "a slow pod of the former start removes nothing of the next"
    first.finish(again, Outcome(code=0))
    assert second.over() == 0 and second.wait_for_settings(SOON) is None


def test_pod_without_rights_says_so(tmp_path: Path, server: KubeServer) -> None:
    server.forbidden.add(("get", "secrets"))
    with pytest.raises(RunError, match=r"cannot get resource .* docs/kubernetes.md"):
        Pod(server, tmp_path, 0).meeting.settings()


def test_who_cannot_reach_the_api_leads_nobody_until_it_can(tmp_path: Path, server: KubeServer) -> None:
    async def scenario() -> None:
        pods = Pods(server, tmp_path, 2)
        first, second = pods.all
        first.meeting.publish(SETTINGS)
        for pod in pods.all:
            pod.start()
        await pods.until(lambda: all(len(pod.agent.announced()) == 2 for pod in pods.all))
        assert await pods.claim(first, 1) and not await pods.claim(second, 2)
        await pods.until(lambda: first.agent.holds(1, "0-x") and second.agent.newest() == (1, "0-x"))
        server.down = True
        server.end_watches()
        await pods.until(lambda: not first.agent.holds(1, "0-x"))
        assert not await pods.claim(second, 2), "nor can another node claim"
        server.down = False
        await pods.until(lambda: first.agent.holds(1, "0-x"))
        begin = second.agent.touched(0)
        await pods.until(lambda: second.agent.touched(0) > begin + 2)  # it renews again
        server.remove(("v1", "pods", "pod-0"))
        pods.all = [second]  # and its processes with it
        assert await pods.claim(second, 2)
        await pods.until(lambda: second.agent.holds(2, "1-x"))

    asyncio.run(scenario())


def test_new_controller_learns_what_has_happened(
    tmp_path: Path, server: KubeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_rendezvous, "_REPLACE", 0.0)
    monkeypatch.setattr(kube_rendezvous, "_LOOK", 0.0)
    failure = FailureNoticed(number=1, cause="node lost", message="gone", node=1, traceback="x" * 5000, time=2.0)
    recovered = Recovered(
        failures=[1], action="shrink", generation=1, ranks=1, layout={}, source="live", step=3, steps_lost=0, noticed=1.0,
        decided=1.0, restarted=1.0, first_step=1.0, seconds=0.0, time=3.0,
    )  # fmt: skip
    events = [Warned(message="a", time=1.0), failure, recovered]

    async def scenario() -> None:
        pods = Pods(server, tmp_path, 2)
        first, second = pods.all
        first.meeting.publish(SETTINGS)
        for pod in pods.all:
            pod.start()
        await pods.until(lambda: len(first.agent.announced()) == 2)
        assert await pods.claim(first, 1)
        for event in events:
            first.agent.record(encode(event))
        first.meeting.handle(LogText(name="rank-0.log", text="one\ntw", time=1.0))
        first.meeting.handle(LogText(name="rank-0.log", text="o\n", time=2.0))
        assert read_events(first.rundir.events_file) == events
        await pods.until(lambda: len(server.of_kind("secrets")["run"]["data"]) == 3)
        asking = asyncio.ensure_future(second.agent.history())
        await pods.until(asking.done)
        known, last = asking.result()
        assert isinstance(known, FailureNoticed) and known.traceback == "x" * 2000 and last == recovered
        monkeypatch.setattr(kube_rendezvous, "_MAX_HISTORY", 3)
        for number in (2, 3):
            first.agent.record(encode(replace(failure, number=number)))
        await pods.until(lambda: len(first.meeting._registry._unsaved) == 0)
        assert len([key for key in server.of_kind("secrets")["run"]["data"] if key != "settings"]) == 3
        # Kubernetes has found the pod of the lost node not ready: it is replaced.
        await pods.until(lambda: ("v1", "pods", "pod-1") not in server.objects)

    asyncio.run(scenario())
    printed = capsys.readouterr().out.splitlines()
    assert printed[:5] == [*(encode(event) for event in events), "[rank-0] one", "[rank-0] two"]
