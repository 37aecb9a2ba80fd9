"""Who leads a run whose nodes are pods, and where its nodes listen: a Lease of the Kubernetes API.

`leaseTransitions` is the term and `holderIdentity` its author, which renews the Lease while it leads. A term is claimed by replacing the version
of the Lease that was read, so that of two claims one gets a conflict. Annotations have the address and the pod of every node, and the newest
term that its author has offered. No clock of another host is read: an author counts as lost that has not renewed for some time on the own clock.

Used by `launch/kube_rendezvous`. Methods raise OSError if the API server cannot be reached, and ApiError if it refuses.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from phalanx.control.protocol import NodeInfo
from phalanx.launch.kube_api import ApiError, KubeApi, Object

_GROUP = "coordination.k8s.io/v1"
_LAUNCH, _OFFERED, _NODE = "phalanx/launch", "phalanx/offered", "phalanx/node-"
_SLACK = 0.25  # of a heartbeat: a renewal that takes longer does not count, and others wait for that long in addition
_ATTEMPTS = 3  # at an update, between which another node has announced itself
_ENDED = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What the Lease says."""

    launch: str = ""
    term: int = 0
    author: str = ""
    offered: int = 0
    renewed: str = ""
    nodes: dict[int, NodeInfo] = field(default_factory=dict)
    pods: dict[int, str] = field(default_factory=dict)
    """The pod of each node."""
    version: int = 0
    """The resource version. Those of one object can be compared as numbers (Kubernetes' KEP-5504)."""

    @classmethod
    def of(cls, lease: Object) -> LeaseState:
        spec, notes = lease.get("spec") or {}, lease["metadata"].get("annotations") or {}
        infos = {int(name.removeprefix(_NODE)): json.loads(text) for name, text in notes.items() if name.startswith(_NODE)}
        return cls(
            launch=notes.get(_LAUNCH, ""),
            term=spec.get("leaseTransitions") or 0,
            author=spec.get("holderIdentity") or "",
            offered=int(notes.get(_OFFERED, "0")),
            renewed=spec.get("renewTime") or "",
            pods={node: info.pop("pod") for node, info in infos.items()},
            nodes={node: NodeInfo(**info) for node, info in infos.items()},
            version=int(lease["metadata"]["resourceVersion"]),
        )


class LeaseRegistry:
    """The Lease of one launch, as one node uses it."""

    def __init__(self, api: KubeApi, name: str, launch: str, heartbeat: float, clock: Callable[[], float] = time.monotonic):
        """`heartbeat`: seconds without a renewal after which the author of a term must not lead any more."""
        self._api, self._launch, self._clock = api, launch, clock
        self._collection = api.path("leases", _GROUP)
        self._path, self._query = f"{self._collection}/{name}", {"fieldSelector": f"metadata.name={name}"}
        self.slack = heartbeat * _SLACK
        self._patience = heartbeat + self.slack
        self.state = LeaseState()
        self.renewals = 0
        """Renewals that were seen."""
        self._seen = -math.inf
        """When the last one was."""
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Begin the launch: no terms, no nodes."""
        lease = self._api.get(self._path)
        lease["metadata"]["annotations"] = {_LAUNCH: self._launch}
        self._observe(self._api.replace(self._path, lease | {"spec": {"leaseTransitions": 0}}))

    def watch(self) -> Iterator[None]:
        """Follow the Lease; yields after each change. Ends only with an error."""
        for change in self._api.watch(self._collection, self._query):
            if change.kind in ("ADDED", "MODIFIED"):
                self._observe(change.value)
                yield

    def announce(self, node: int, info: NodeInfo, pod: str) -> None:
        """Publish the address of a node."""
        self._annotate({f"{_NODE}{node}": json.dumps(asdict(info) | {"pod": pod})})

    def claim(self, term: int, author: str) -> bool:
        """Become the author of a term; False if another node is, or the author of the one before still leads."""
        lease = self._read()
        state = self.state
        if (state.term, state.author) == (term, author):
            return True
        if term != state.term + 1 or self._leads(state):
            return False
        now = _now()
        seconds = math.ceil(self._patience)
        spec = {"leaseTransitions": term, "holderIdentity": author, "leaseDurationSeconds": seconds, "acquireTime": now}
        return self._replace(lease | {"spec": spec | {"renewTime": now}})

    def renew(self, term: int, author: str) -> bool:
        """Show a sign of life; False if this author does not lead any more."""
        for _ in range(_ATTEMPTS):
            lease = self._read()
            if (self.state.term, self.state.author) != (term, author):
                return False
            if self._replace(lease | {"spec": lease["spec"] | {"renewTime": _now()}}):
                return True
        return False

    def offer(self, term: int) -> None:
        """The author lets others claim the next term at once."""
        self._annotate({_OFFERED: str(term)})

    def release(self, node: int, author: str) -> None:
        """The agent of a node is gone, and with it the term if it led."""
        self._read()
        notes: dict[str, str | None] = {f"{_NODE}{node}": None}
        self._annotate(notes | ({_OFFERED: str(self.state.term)} if self.state.author == author else {}))

    def replace_pod(self, pod: str) -> bool:
        """Have a pod replaced whose node is lost. False if Kubernetes finds it well: it may only be cut off from the other nodes.

        A Job replaces a pod as soon as it has ended. The pod of a host that cannot be reached is not ready, but does not end for minutes, or
        never.
        """
        path = f"{self._api.path('pods')}/{pod}"
        found = self._api.find(path)
        if found is None or found["status"].get("phase") in _ENDED:
            return True
        if any(one["type"] == "Ready" and one["status"] == "True" for one in found["status"].get("conditions") or []):
            return False
        message = "Its node shows no sign of life to the other nodes of the run."
        self._api.patch(f"{path}/status", {"status": {"phase": "Failed", "reason": "NodeLost", "message": message}})
        self._api.delete(path, grace=0)
        return True

    def _leads(self, state: LeaseState) -> bool:
        """Whether the author of the newest term may still lead."""
        if not state.author or state.offered >= state.term or self._clock() - self._seen > self._patience:
            return False
        node = int(state.author.partition("-")[0])
        info = state.nodes.get(node)
        if info is None or info.name != state.author:
            return info is None  # its agent was started again
        pod = self._api.find(f"{self._api.path('pods')}/{state.pods[node]}")
        return pod is not None and pod["status"].get("phase") not in _ENDED

    def _read(self) -> Object:
        lease = self._api.get(self._path, seconds=max(1.0, self._patience / 2))
        self._observe(lease)
        return lease

    def _replace(self, lease: Object) -> bool:
        """Replace the version that was read; False if there is a newer one."""
        try:
            self._observe(self._api.replace(self._path, lease, seconds=max(1.0, self._patience / 2)))
        except ApiError as error:
            if error.status != http.client.CONFLICT:
                raise
            return False
        return True

    def _annotate(self, notes: dict[str, str | None] | dict[str, str]) -> None:
        self._observe(self._api.patch(self._path, {"metadata": {"annotations": notes}}))

    def _observe(self, lease: Object) -> None:
        state = LeaseState.of(lease)
        if state.launch != self._launch:
            raise ApiError(http.client.GONE, f"{self._path} belongs to another start of the job")
        with self._lock:
            if state.version < self.state.version:
                return  # the answer to a request and the watch, in different threads, overtake each other
            if (state.term, state.renewed) > (self.state.term, self.state.renewed):
                self.renewals, self._seen = self.renewals + 1, self._clock()
            self.state = state


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
