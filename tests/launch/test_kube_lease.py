"""Who leads a run in pods: the Lease, against a server with versions, conflicts and watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from kube_server import KubeServer

from phalanx.control.protocol import NodeInfo
from phalanx.launch.kube_api import ApiError, KubeApi, Object
from phalanx.launch.kube_lease import LeaseRegistry

HEARTBEAT = 2.0
LEASE = ("coordination.k8s.io/v1", "leases", "run")
SOON = 30.0  # seconds that a busy machine may take


class Nodes:
    """Registries of several nodes, with a clock that only tests move."""

    def __init__(self, server: KubeServer, count: int):
        self.now, self.server = 0.0, server
        api = KubeApi(server.url, server.namespace)
        server.put(
            LEASE, {"apiVersion": LEASE[0], "kind": "Lease", "metadata": {"name": "run"}, "spec": {"leaseTransitions": 0}}
        )
        self.all = [LeaseRegistry(api, "run", "launch-1", HEARTBEAT, lambda: self.now) for _ in range(count)]
        self.all[0].reset()
        for node, registry in enumerate(self.all):
            self.pod(node, "Running")
            registry.announce(node, NodeInfo(name=f"{node}-x", address=["10.0.0.1", node], pid=1), f"pod-{node}")

    def pod(self, node: int, phase: str, *, ready: bool = True) -> None:
        status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
        self.server.put(("v1", "pods", f"pod-{node}"), {"metadata": {"name": f"pod-{node}"}, "status": status})


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with closing(KubeServer()) as server:
        yield server


def test_author_leads_until_it_has_not_renewed_for_a_heartbeat(server: KubeServer) -> None:
    nodes = Nodes(server, 2)
    first, second = nodes.all
    assert first.claim(1, "0-x") and not second.claim(1, "1-x") and not second.claim(2, "1-x")
    assert (second.state.term, second.state.author) == (1, "0-x")
    assert second.state.nodes[0] == NodeInfo(name="0-x", address=["10.0.0.1", 0], pid=1)
    lease = server.objects[LEASE]["spec"]
    assert lease["leaseTransitions"] == 1 and lease["holderIdentity"] == "0-x" and lease["leaseDurationSeconds"] == 3
    nodes.now += HEARTBEAT
    assert first.renew(1, "0-x")
    nodes.now += HEARTBEAT
    assert not second.claim(2, "1-x"), "it has been renewed since"
    nodes.now += 1.1 * HEARTBEAT
    assert not second.claim(2, "1-x"), "the author may still believe that it leads"
    nodes.now += 0.2 * HEARTBEAT
    assert second.claim(2, "1-x")
    assert not first.renew(1, "0-x") and first.state.author == "1-x", "a deposed author finds out"


def test_a_conflict_is_no_renewal_and_no_claim(server: KubeServer) -> None:
    nodes = Nodes(server, 4)
    with ThreadPoolExecutor(4) as pool:
        for term in range(1, 21):
            won = list(pool.map(lambda node, term=term: nodes.all[node].claim(term, f"{node}-x"), range(4)))
            author = server.objects[LEASE]["spec"]["holderIdentity"]
            assert won.count(True) == 1 and author == f"{won.index(True)}-x", f"term {term}"
            nodes.now += 2 * HEARTBEAT
    # Others announce themselves while the author renews: that is a conflict, but no other author.
    leader = nodes.all[won.index(True)]
    with ThreadPoolExecutor(2) as pool:
        noise = pool.submit(lambda: [nodes.all[0].offer(0) for _ in range(30)])
        assert sum(leader.renew(20, author) for _ in range(10)) >= 1
        noise.result()
    assert server.objects[LEASE]["spec"]["leaseTransitions"] == 20


def test_term_of_a_pod_that_has_ended_can_be_claimed_at_once(server: KubeServer) -> None:
    nodes = Nodes(server, 3)
    first, second, third = nodes.all
    assert first.claim(1, "0-x")
    nodes.pod(0, "Failed")
    assert second.claim(2, "1-x")
    server.remove(("v1", "pods", "pod-1"))
    assert third.claim(3, "2-x")
    third.release(2, "2-x")  # its agent has died, its pod has not
    assert 2 not in third.state.nodes and first.claim(4, "0-x")
    first.announce(0, NodeInfo(name="0-y", address=["10.0.0.1", 9], pid=2), "pod-0")
    nodes.pod(0, "Running")
    assert second.claim(5, "1-x"), "the agent of node 0 was started again"
    second.offer(5)
    assert first.claim(6, "0-y") and first.state.offered == 5


def test_nobody_leads_without_the_api_server(server: KubeServer) -> None:
    nodes = Nodes(server, 2)
    first, second = nodes.all
    assert first.claim(1, "0-x")
    server.down = True
    for attempt in (lambda: first.renew(1, "0-x"), lambda: second.claim(2, "1-x")):
        with pytest.raises(OSError):
            attempt()
    server.down = False
    nodes.now += 5 * HEARTBEAT
    assert first.renew(1, "0-x"), "nobody else has claimed"
    assert not second.claim(2, "1-x"), "it leads again"


def test_late_answer_does_not_hide_what_the_watch_has_told(server: KubeServer) -> None:
    nodes = Nodes(server, 1)

    class SlowApi(KubeApi):
        def patch(self, path: str, patch: Object) -> Object:
            answer = super().patch(path, patch)
            nodes.all[0].announce(2, NodeInfo(name="2-x", address=["10.0.0.1", 2], pid=1), "pod-2")
            next(watch)  # all three are in the list with which a watch begins
            return answer

    api = SlowApi(server.url, server.namespace)
    second = LeaseRegistry(api, "run", "launch-1", HEARTBEAT)
    watch = second.watch()
    second.announce(1, NodeInfo(name="1-x", address=["10.0.0.1", 1], pid=1), "pod-1")
    assert second.state.nodes.keys() == {0, 1, 2}


def test_lease_of_another_start_is_left_alone(server: KubeServer) -> None:
    nodes = Nodes(server, 2)
    first, second = nodes.all
    assert first.claim(1, "0-x")
    LeaseRegistry(KubeApi(server.url, server.namespace), "run", "launch-2", HEARTBEAT).reset()
    nodes.now += 5 * HEARTBEAT
    for attempt in (lambda: first.renew(1, "0-x"), lambda: second.claim(2, "1-x")):
        with pytest.raises(ApiError, match="another start"):
            attempt()
    assert server.objects[LEASE]["spec"] == {"leaseTransitions": 0}


@pytest.mark.parametrize("disturb", ["nothing", "end", "gone", "down"])
def test_watch_sees_every_term_whatever_happens_to_it(server: KubeServer, disturb: str) -> None:
    nodes = Nodes(server, 2)
    first, second = nodes.all
    watching, seen = threading.Event(), threading.Event()

    def follow() -> None:
        while True:
            try:
                for _ in second.watch():
                    watching.set()
                    if second.state.term == 2:
                        seen.set()
                        return
            except OSError:
                time.sleep(0.05)

    threading.Thread(target=follow, daemon=True).start()
    assert watching.wait(SOON) and first.claim(1, "0-x")
    while second.state.term < 1:  # the stream is open
        time.sleep(0.01)
    if disturb == "end":
        server.end_watches()
    elif disturb == "gone":
        server.compact()
    elif disturb == "down":
        server.down = True
        server.end_watches()
        time.sleep(0.2)
        server.down = False
    first.offer(1)
    assert first.claim(2, "0-x") and seen.wait(SOON)
    assert second.state.author == "0-x" and second.renewals >= 1
    if disturb == "gone":
        assert (
            len([line for line in server.requests if line.startswith("GET") and "leases?" in line and "watch" not in line]) >= 2
        )


def test_pod_of_a_lost_node_is_replaced_only_if_kubernetes_finds_it_unwell(server: KubeServer) -> None:
    nodes = Nodes(server, 1)
    pod, registry = ("v1", "pods", "pod-0"), nodes.all[0]
    assert not registry.replace_pod("pod-0") and pod in server.objects, "it may only be cut off from the others"
    nodes.pod(0, "Running", ready=False)
    before = len(server.requests)
    assert registry.replace_pod("pod-0") and pod not in server.objects
    status, deletion = (line for line in server.requests[before:] if not line.startswith("GET"))
    assert status.endswith("pods/pod-0/status") and deletion.startswith("DELETE"), "a Job replaces a pod that has failed"
    assert registry.replace_pod("pod-0"), "it is gone"
