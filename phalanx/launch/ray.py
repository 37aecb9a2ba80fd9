"""The Ray launcher: one actor per node of a Ray cluster, each with an agent as a process of its own. The agents end with their actors, and these
with the command that started the run.

The agents' own heartbeats decide who is lost: Ray takes from 14 s to a minute. A lost actor is started again at once, on whatever node Ray
finds for it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from phalanx.control.protocol import AgentSettings, Message, decode, encode
from phalanx.host.env import forwarded, python_path
from phalanx.host.host_report import HostQuestion, HostReport, report
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.host_group import HostGroup
from phalanx.launch.launcher import StartedAgent
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

_PLACEMENT_SECONDS = 60.0  # in which Ray finds the nodes; an autoscaler may have to start them
_REPORT_SECONDS = 60.0  # in which an actor starts and reports
_WAIT = 1.0  # seconds that an actor waits for messages before it answers
_RESTART = 1.0  # seconds until the actor of a lost node is started again
_LOST = -9  # exit code of an agent whose actor is gone


class AgentHost:
    """The actor of a node."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None

    def report(self, question: dict[str, Any]) -> dict[str, Any]:
        """This node, as a `HostReport`."""
        from ray.util import get_node_ip_address

        answer = report(HostQuestion(**{**question, "paths": tuple(question["paths"])}))
        return asdict(replace(answer, reached_at=get_node_ip_address()))

    def start(self, settings: dict[str, Any]) -> None:
        """Start the agent."""
        own: AgentSettings = decode(settings)
        logs = Path(own.run_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._agent = AgentProcess(own, logs / f"node-{own.node}.log")

    def send(self, message: dict[str, Any]) -> None:
        if self._agent is not None:
            self._agent.send(decode(message))

    def receive(self) -> tuple[list[dict[str, Any]], int | None]:
        """Messages of the agent, as soon as there are any; and its exit code, None while it lives."""
        assert self._agent is not None
        code = self._agent.poll()
        if code is None:
            select.select([self._agent], [], [], _WAIT)
        return [encode(message) for message in self._agent.receive()], code


class RayAgent:
    """An agent behind an actor. Implements `launch/launcher.StartedAgent`."""

    def __init__(self, actor: Any, settings: AgentSettings):
        self._actor, self._messages = actor, deque[Message]()
        self._code: int | None = None
        self._readable, self._wake = os.pipe()
        self._starting = actor.start.remote(encode(settings))
        threading.Thread(target=self._follow, name="ray agent", daemon=True).start()

    def _follow(self) -> None:
        import ray

        try:
            ray.get(self._starting)  # the calls of an actor with several threads are not in order
            while True:
                messages, code = ray.get(self._actor.receive.remote())
                self._messages.extend(decode(message) for message in messages)
                if messages:
                    os.write(self._wake, b"x")
                elif code is not None:
                    self._code = code
                    break
        except (ray.exceptions.RayError, OSError):
            self._code = _LOST
        os.close(self._wake)  # readable from now on: its end

    def fileno(self) -> int:
        return self._readable

    def send(self, message: Message) -> bool:
        if self._code is None:
            self._actor.send.remote(encode(message))
        return self._code is None

    def receive(self) -> list[Message]:
        while select.select([self._readable], [], [], 0)[0] and os.read(self._readable, 4096):
            pass
        received = []
        while self._messages:
            received.append(self._messages.popleft())
        return received

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)

    def close(self) -> None:
        self.kill()


class Ray(HostGroup):
    """Nodes of a Ray cluster, one actor on each."""

    def __init__(self, run: Run):
        try:
            import ray
        except ImportError:
            raise RunError("cluster.launcher = \"ray\" needs the package ray: pip install 'phalanx[ray]'.") from None
        if not ray.is_initialized():
            try:
                ray.init(address=run.cluster.ray_address, namespace="phalanx", log_to_driver=False, logging_level="ERROR")
            except ConnectionError as error:
                raise RunError(
                    f'cluster.ray_address = "{run.cluster.ray_address}": no Ray cluster answers there ({error}): start one with '
                    "`ray start --head`, or name its address."
                ) from None
        self._bundles = _bundles(run, ray.nodes())
        super().__init__(run, [f"Ray node {number}" for number in range(len(self._bundles))])
        given = run.resilience.node_return
        self.restart_after = _RESTART if given is None else given
        self._group: Any = None
        self._actors: dict[int, Any] = {}

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        answer = self._reports[settings.node]
        slots = self._slots(settings.node, answer) or settings.slots
        bind = self._address(settings.node) or settings.bind
        # Each actor runs one agent. The one that has reported is new; after a loss, another one is needed.
        actor = self._actors.pop(settings.node, None) or self._actor(settings.node)
        return RayAgent(actor, replace(settings, bind=bind, slots=slots, environment=forwarded(), parent=None))

    def _actor(self, node: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        path = python_path()
        return (
            ray.remote(AgentHost)
            .options(
                name=f"{self._name}-node-{node}-{os.urandom(2).hex()}",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement(), placement_group_bundle_index=node),
                runtime_env={"env_vars": {"PYTHONPATH": path}} if path else None,
            )
            .remote()
        )

    @property
    def _name(self) -> str:
        return f"phalanx-{os.getpid()}"

    def _placement(self) -> Any:
        """The placement group, one bundle per node."""
        import ray
        from ray.util.placement_group import placement_group

        if self._group is None:
            group = placement_group(self._bundles, strategy="STRICT_SPREAD", name=self._name)
            if not ray.wait([group.ready()], timeout=_PLACEMENT_SECONDS)[0]:
                ray.util.remove_placement_group(group)
                raise RunError(
                    f"Ray has found no {self.nodes} nodes with {self._bundles[0]} each within {_PLACEMENT_SECONDS:.0f} s: lower cluster.nodes, "
                    "or add nodes."
                )
            self._group = group
        return self._group

    def _ask(self, question: HostQuestion) -> list[HostReport]:
        for node in range(self.nodes):  # not in the threads that ask
            if node not in self._actors:
                self._actors[node] = self._actor(node)
        return super()._ask(question)

    def _report(self, node: int, question: HostQuestion) -> HostReport:
        import ray

        try:
            return HostReport.from_json(ray.get(self._actors[node].report.remote(asdict(question)), timeout=_REPORT_SECONDS))
        except ray.exceptions.RayError as error:
            raise OSError(
                f"{str(error).strip().splitlines()[-1]}; Phalanx must be installed on every node of the cluster"
            ) from None


def _bundles(run: Run, nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What each node must offer: all its GPUs, or a CPU."""
    usable = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    gpus = [] if run.cluster.device == "cpu" else [resources["GPU"] for resources in usable if resources.get("GPU", 0) >= 1]
    count = run.cluster.nodes if run.cluster.nodes > 1 else len(gpus) or len(usable)
    if not count:
        raise RunError("The Ray cluster has no node with a free CPU: look at `ray status`.")
    return [{"CPU": 1.0, **({"GPU": min(gpus)} if gpus else {})}] * count


LAUNCHER = Ray
