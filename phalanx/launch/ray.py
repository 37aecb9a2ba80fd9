"""The Ray launcher: one actor per node of a Ray cluster, each with an agent as a process of its own. The agents end with their actors, and these
with the command that started the run.

The agents' own heartbeats decide who is lost: Ray takes from 14 s to a minute. A lost actor is started again at once, on whatever node Ray
finds for it. A node that Ray drains is told to its agent, and the run does without it before it is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import threading
import time
from collections import Counter, deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from phalanx.control.codec import Message, decode, encode
from phalanx.control.protocol import AgentSettings, Leave, LogText, Record, Touch
from phalanx.host.env import forwarded, python_path
from phalanx.host.host_report import HostQuestion, HostReport, report
from phalanx.host.interfaces import address_of
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.host_group import HostGroup
from phalanx.launch.launcher import StartedAgent
from phalanx.spec.errors import RunError
from phalanx.spec.run import Cluster, Run

_PLACEMENT_SECONDS = 60.0  # in which Ray finds the nodes; an autoscaler may have to start them
_REPORT_SECONDS = 60.0  # in which an actor starts and reports
_WAIT = 1.0  # seconds that an actor waits for messages before it answers
_GATHER = 0.5  # seconds that records wait for others
_LOOK = 0.1  # seconds between two looks whether something more urgent has come meanwhile
_PATIENT = {kind.__name__ for kind in (LogText, Record, Touch)}
_RESTART = 1.0  # seconds until the actor of a lost node is started again
_LOST = -9  # exit code of an agent whose actor is gone
_DRAIN_POLL = 1.0  # seconds between two questions which nodes Ray drains


class AgentHost:
    """The actor of a node."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None
        self._waiting: dict[int, dict[str, Any]] = {}
        """Messages for the agent that came before it, or before others."""
        self._passed_on = 0
        self._lock = threading.Lock()

    def report(self, question: dict[str, Any]) -> dict[str, Any]:
        """This node, as a `HostReport`."""
        return asdict(report(HostQuestion(**{**question, "paths": tuple(question["paths"])})))

    def start(self, settings: dict[str, Any]) -> str:
        """Start the agent. Returns Ray's id of this node."""
        import ray
        from ray.util import get_node_ip_address

        own: AgentSettings = decode(settings)
        # Here, because the actor of a lost node may be started on another.
        given = None if own.bind == Cluster().bind else address_of(own.bind)
        own = replace(own, bind=given or get_node_ip_address())
        logs = Path(own.run_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._agent = AgentProcess(own, logs / f"node-{own.node}.log")
            self._pass_on()
        return str(ray.get_runtime_context().get_node_id())

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Pass a message on to the agent. Calls of an actor with several threads are not in order, so that messages are numbered."""
        with self._lock:
            self._waiting[number] = message
            self._pass_on()

    def _pass_on(self) -> None:
        while self._agent is not None and self._passed_on in self._waiting:
            self._agent.send(decode(self._waiting.pop(self._passed_on)))
            self._passed_on += 1

    def receive(self) -> tuple[bytes, int | None]:
        """Messages of the agent, one per line, as soon as there are any; and its exit code, None while it lives. Records wait for others: a
        call takes milliseconds of a core at both ends, and a run may have many steps a second."""
        assert self._agent is not None
        code, lines, until = self._agent.poll(), list[bytes](), time.monotonic() + _WAIT
        while code is None and (left := until - time.monotonic()) > 0:
            if not lines:
                select.select([self._agent], [], [], left)
            new = self._agent.receive_lines()
            if not new and not lines:
                break  # it has ended, or the time is over
            if not lines:
                until = min(until, time.monotonic() + _GATHER)
            lines += new
            if not all(json.loads(line)["message"] in _PATIENT for line in new):
                break
            time.sleep(_LOOK)
        return b"\n".join(lines + self._agent.receive_lines()), code


class RayAgent:
    """An agent behind an actor. Implements `launch/launcher.StartedAgent`."""

    def __init__(self, actor: Any, settings: AgentSettings):
        self._actor, self._messages = actor, deque[Message]()
        self._code: int | None = None
        self._told, self._sent = False, 0
        self.ray_node: str | None = None
        """Ray's id of the node; None while it starts."""
        self._readable, self._wake = os.pipe()
        self._starting = actor.start.remote(encode(settings))
        threading.Thread(target=self._follow, name="ray agent", daemon=True).start()

    def _follow(self) -> None:
        import ray

        try:
            self.ray_node = ray.get(self._starting)  # the calls of an actor with several threads are not in order
            while True:
                lines, code = ray.get(self._actor.receive.remote())
                self._messages.extend(decode(json.loads(line)) for line in lines.splitlines())
                if lines:
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
            self._actor.send.remote(self._sent, encode(message))
            self._sent += 1
        return self._code is None

    def leave(self, deadline: float | None) -> None:
        """Ray drains the node. `deadline`: when it is gone, in seconds since 1970."""
        if not self._told:
            seconds = None if deadline is None else max(0.0, deadline - time.time())
            self._told = self.send(Leave(reason="Ray drains it", seconds=seconds))

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
    """Nodes of a Ray cluster, one actor on each. As a context manager it gives the nodes back at its end; otherwise they are free when the
    process ends."""

    def __init__(self, run: Run, name: str = "run"):
        connect(run.cluster.ray_address)
        import ray

        draining = _draining()
        self._bundles = bundles(run, [node for node in ray.nodes() if node["NodeID"] not in draining])
        super().__init__(run, [f"Ray node {number}" for number in range(len(self._bundles))])
        given = run.resilience.node_return
        self.restart_after = _RESTART if given is None else given
        self._name, self._namespace = f"phalanx {name}", f"phalanx-{secrets.token_hex(4)}"
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._agents: dict[int, RayAgent] = {}
        self._starts: Counter[int] = Counter()
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        self._closed.set()
        if self._group is not None and ray.is_initialized():
            ray.util.remove_placement_group(self._group)  # and with it the actors
            self._group = None

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        slots = self._slots(settings.node, self._reports[settings.node]) or settings.slots
        # Each actor runs one agent. The one that has reported is new; after a loss, another one is needed.
        actor = self._actors.pop(settings.node, None) or self._actor(settings.node)
        own = replace(settings, bind=self._run.cluster.bind, slots=slots, environment=forwarded(), parent=None)
        agent = RayAgent(actor, own)
        if not self._agents:
            threading.Thread(target=self._watch_drains, name="ray drains", daemon=True).start()
        self._agents[settings.node] = agent
        return agent

    def _watch_drains(self) -> None:
        """Tell agents whose node Ray drains, because it is preempted, scaled down or maintained."""
        while not self._closed.wait(_DRAIN_POLL):
            draining = _draining()
            for agent in list(self._agents.values()):
                if agent.ray_node in draining:
                    agent.leave(draining[agent.ray_node])

    def _actor(self, node: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        path = python_path()
        self._starts[node] += 1
        again = "" if self._starts[node] == 1 else f", start {self._starts[node]}"
        return (
            ray.remote(AgentHost)
            .options(
                name=f"{self._name} node {node}{again}",
                namespace=self._namespace,
                num_cpus=0,
                num_gpus=self._bundles[node].get("GPU", 0),
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement(), placement_group_bundle_index=node),
                runtime_env={"env_vars": {"PYTHONPATH": path}} if path else None,
            )
            .remote()
        )

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


def connect(address: str) -> None:
    """Connect this process to a Ray cluster, unless it is connected to one already."""
    try:
        import ray
    except ImportError:
        raise RunError("cluster.launcher = \"ray\" needs the package ray: pip install 'phalanx[ray]'.") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise RunError(
                f'cluster.ray_address = "{address}": no Ray cluster answers there ({error}): start one with `ray start --head`, or name '
                "its address."
            ) from None


def bundles(run: Run, nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What Ray reserves on each node: the GPUs, or cores, of its ranks. Whole tensor groups are on one node.

    Without a layout in the run file the run takes whole nodes, and all of them unless cluster.nodes says how many.
    """
    usable = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    with_gpus = [] if run.cluster.device == "cpu" else [resources for resources in usable if resources.get("GPU", 0) >= 1]
    if not usable:
        raise RunError("The Ray cluster has no node with a CPU: look at `ray status`.")
    kind = "GPU" if with_gpus else "CPU"
    most = int(min(resources[kind] for resources in with_gpus or usable))
    spares, layout, count = run.resilience.spares, run.layout, run.cluster.nodes if run.cluster.nodes > 1 else None
    if layout.data is None:
        count, here = count or len(with_gpus or usable), most
    else:
        each = 1 if with_gpus else run.cluster.threads or 1  # cores of a rank
        count = count or spares + -(-layout.ranks // max(1, most // each // layout.tensor * layout.tensor))
        groups = -(-layout.ranks // layout.tensor)
        here = min(most, -(-groups // max(1, count - spares)) * layout.tensor * each)
    cores = min(int(min(resources["CPU"] for resources in with_gpus)), here) if with_gpus else here
    return [{"CPU": float(cores), **({"GPU": float(here)} if with_gpus else {})}] * count


def _draining() -> dict[str, float | None]:
    """Nodes that Ray drains, by their ids, and when each is gone, in seconds since 1970. Ray has no public function for it: Ray Train and
    Ray Serve call this one."""
    import ray

    try:
        found = ray._private.state.state.get_draining_nodes()
    except (AttributeError, ray.exceptions.RayError):
        return {}
    return {node: milliseconds / 1000 if milliseconds else None for node, milliseconds in found.items()}


LAUNCHER = Ray
