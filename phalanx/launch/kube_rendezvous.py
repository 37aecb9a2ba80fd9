"""Where the pods of a run meet: through the Kubernetes API, whether or not they share a folder.

A Secret has the settings of the agents, with the token, and the records that a new controller must know; a Lease says who leads
(`launch/kube_lease`). To its agent a pod's `phalanx node` is the launcher that keeps the registry (`control/launcher_registry`): it hears the state
of the Lease only while that is certain, so that a node which cannot reach the API server leads nobody.

Records and the logs of ranks go to the pod's own output, where Kubernetes keeps them and `phalanx train --on kubernetes` reads them.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from phalanx.control import codec, protocol
from phalanx.control.protocol import AgentSettings, Outcome
from phalanx.control.registry import HISTORY
from phalanx.control.run_requests import LiveBeats, RequestFiles
from phalanx.events.log import RecordWriter
from phalanx.events.records import Event, FailureNoticed, decode, encode
from phalanx.events.rundir import RunDir, replace_file
from phalanx.launch.kube_api import ApiError, KubeApi, Object
from phalanx.launch.kube_lease import LeaseRegistry
from phalanx.spec.errors import RunError

_RETRY = 1.0  # seconds until an API server that cannot be reached is asked again
_TICK = 0.1  # seconds between two looks whether the Lease must be renewed
_RENEWALS = 3  # per heartbeat
_REPLACE = (
    30.0  # seconds after which the pod of a lost node is replaced, if Kubernetes finds it not ready, too, but has not done so
)
_GIVE_UP = 1800.0  # seconds after which a lost node must have returned
_LOOK = 5.0  # seconds between two looks at the pods of lost nodes
_FINISH_SECONDS = 10.0  # in which the end of the run is noted
_TRACEBACK = 2000  # characters of a traceback that a new controller gets
_HISTORY = "history-"
_MAX_HISTORY = 200  # records that a new controller gets: a Secret holds 1 MiB

T = TypeVar("T")


class KubeRendezvous:
    """Implements `launch/rendezvous.Rendezvous`."""

    registry = "launcher"

    def __init__(self, api: KubeApi, name: str, pod: str, rundir: RunDir, *, shared: bool):
        self.shared, self.launch = shared, f"{name}-{time.time_ns():x}"
        self._api, self._name, self._pod, self._rundir = api, name, pod, rundir
        self._secrets = api.path("secrets")
        self._secret = f"{self._secrets}/{name}"
        self._writer: RecordWriter | None = None
        self._registry: _Registry | None = None
        self._lines: dict[str, str] = {}
        """Of each log, the line that is not complete yet."""
        self._requests = RequestFiles(rundir)

    def over(self) -> int | None:
        return _code(_patiently(lambda: self._api.get(self._secret)))

    def settings(self) -> AgentSettings | None:
        return _settings(_patiently(lambda: self._api.get(self._secret)))

    def wait_for_settings(self, seconds: float) -> AgentSettings | None:
        deadline = time.monotonic() + seconds

        def ask() -> AgentSettings | None:
            for change in self._api.watch(self._secrets, {"fieldSelector": f"metadata.name={self._name}"}):
                settings = _settings(change.value) if change.kind in ("ADDED", "MODIFIED") else None
                if settings is not None or _code(change.value) is not None or time.monotonic() > deadline:
                    return settings
            return None

        return _patiently(ask)

    def publish(self, settings: AgentSettings) -> None:
        lease = LeaseRegistry(self._api, self._name, settings.launch, 1.0)
        _patiently(lease.reset)
        secret = _patiently(lambda: self._api.get(self._secret))
        old = {key: None for key in secret.get("data") or {} if key.startswith(_HISTORY)}
        data = {**old, "settings": _encoded(json.dumps(codec.encode(settings)))}
        _patiently(lambda: self._api.patch(self._secret, {"data": data}))

    def record(self, line: str) -> None:
        self._record(protocol.Record(line=line))

    def stop_requested(self) -> bool:
        return False  # the Job would start the pods again: it is suspended instead, which sends them SIGTERM

    def follow(self, settings: AgentSettings, heartbeat: float) -> None:
        if self._registry is None:
            lease = LeaseRegistry(self._api, self._name, settings.launch, heartbeat)
            self._registry = _Registry(self._api, self._secret, lease, settings.node, self._pod, heartbeat)

    def handle(self, message: codec.Message) -> None:
        assert self._registry is not None
        match message:
            case protocol.Record():
                self._record(message)
            case protocol.LogText():
                *lines, rest = (self._lines.get(message.name, "") + message.text).split("\n")
                self._lines[message.name] = rest
                for line in lines:
                    print(f"[{message.name.removesuffix('.log')}] {line}", flush=True)
            case LiveBeats():
                self._requests.publish(message.text)
            case _:
                self._registry.handle(message)

    def messages(self) -> list[codec.Message]:
        """A request arrives in the run directory of any pod, by `phalanx profile` in that pod."""
        return [] if self._registry is None else [*_drain(self._registry.answers), *self._requests.take()]

    def leads(self, node: int) -> bool:
        return self._registry is not None and self._registry.leads

    def lose(self) -> None:
        assert self._registry is not None
        self._registry.handle(None)

    def finish(self, settings: AgentSettings, outcome: Outcome) -> None:
        """Pods that start after the end of the run learn it; if the run is to go on, they prepare it anew."""
        if self._registry is not None:
            self._registry.close()
        if self.shared:
            replace_file(self._rundir.exit_file, f"{outcome.code}\n")
        deadline = time.monotonic() + _FINISH_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ApiError):
                secret = self._api.get(self._secret)
                found, data = _settings(secret), secret.get("data") or {}
                if found is not None and found.token == settings.token:
                    data.pop("settings")
                    if outcome.code != protocol.RESUMABLE:
                        data["outcome"] = _encoded(str(outcome.code))
                    self._api.replace(self._secret, secret | {"data": data})
                return
            time.sleep(_RETRY)

    def _record(self, record: protocol.Record) -> None:
        if self._writer is None:
            self._rundir.create()
            self._writer = RecordWriter(self._rundir.events_file)
        self._writer.write(record.line, if_new=record.if_new)
        print(record.line, flush=True)
        event = decode(record.line)
        if self._registry is not None and isinstance(event, HISTORY):
            self._registry.remember(event)


class _Registry:
    """The registry as the agent's `LauncherRegistry` knows it. One thread follows the Lease, another one does everything else with the API."""

    def __init__(self, api: KubeApi, secret: str, lease: LeaseRegistry, node: int, pod: str, heartbeat: float):
        self._api, self._secret, self._lease, self._node, self._pod = api, secret, lease, node, pod
        self._heartbeat, self._renew_due, self._look_due = heartbeat, 0.0, 0.0
        self.answers: SimpleQueue[codec.Message] = SimpleQueue()
        self._requests: SimpleQueue[codec.Message | None] = SimpleQueue()
        self._info: protocol.NodeInfo | None = None
        self._announced, self._touched, self._closed = True, False, False
        self._missed = False
        """The last renewal has failed. The agent may have stepped down for it, and then shows no signs of life until the next one."""
        self._unsaved: dict[str, str] = {}
        """Records for the next controller that are not in the Secret yet, by their key there."""
        self._saved: list[str] = []
        """Keys of those that are, oldest first."""
        self._lost: dict[str, float] = {}
        """Pods of lost nodes, and when they were lost."""
        self._told: tuple[int, str, int, dict[int, protocol.NodeInfo]] | None = None
        self._telling = threading.Lock()
        """Both threads tell the agent the state: an older one never after a newer one."""
        for work in (self._follow_lease, self._work):
            threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()

    def handle(self, message: codec.Message | None) -> None:
        """Handle a message of the agent; None: it has ended."""
        if isinstance(message, protocol.Touch):
            self._touched = True
        else:
            self._requests.put(message)

    def remember(self, event: Event) -> None:
        """A new controller must know this record of the agent, which is the controller."""
        if isinstance(event, FailureNoticed):
            if event.cause == "node lost" and event.node is not None and (pod := self._lease.state.pods.get(event.node)):
                self._lost[pod] = time.monotonic()
            event = replace(event, traceback=event.traceback[-_TRACEBACK:])
        self._unsaved[f"{_HISTORY}{time.time_ns():020d}"] = encode(event)

    def close(self) -> None:
        self._closed = True

    @property
    def leads(self) -> bool:
        """Whether the agent of this host is the controller."""
        return self._info is not None and self._lease.state.author == self._info.name

    # --- the threads ---

    def _follow_lease(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError, ApiError):
                for _ in self._lease.watch():
                    self._tell(from_watch=True)
                    if self._closed:
                        return
            time.sleep(_RETRY)

    def _work(self) -> None:
        while not self._closed:
            request, failed = None, False
            with contextlib.suppress(Empty):
                request = self._requests.get(timeout=_TICK)
                try:
                    self._answer(request)
                except (OSError, ApiError):
                    failed = True
            if failed and isinstance(request, protocol.ClaimTerm):
                self.answers.put(protocol.TermClaimed(term=request.term, granted=False))
            elif failed and isinstance(request, protocol.AskHistory):
                self._requests.put(request)
            with contextlib.suppress(OSError, ApiError):
                self._keep_up()

    def _answer(self, request: codec.Message | None) -> None:
        match request:
            case protocol.Announce():
                self._info, self._announced = request.info, False
            case protocol.ClaimTerm():
                granted = self._lease.claim(request.term, request.author)
                self._tell()  # before the answer: the agent leads only in the newest term that it knows
                self.answers.put(protocol.TermClaimed(term=request.term, granted=granted))
            case protocol.OfferTerm():
                self._lease.offer(request.term)
                self._tell()
            case protocol.AskHistory():
                data = self._api.get(self._secret).get("data") or {}
                self._saved = sorted(key for key in data if key.startswith(_HISTORY))
                self.answers.put(protocol.History(lines=[_decoded(data[key]) for key in self._saved]))
            case None if self._info is not None:
                info, self._info = self._info, None
                self._lease.release(self._node, info.name)

    def _keep_up(self) -> None:
        if not self._announced and self._info is not None:
            self._lease.announce(self._node, self._info, self._pod)
            self._announced = True
            self._tell()
        state, now = self._lease.state, time.monotonic()
        leads = self.leads
        if leads and (self._touched or self._missed) and now >= self._renew_due:
            self._touched, self._missed, self._renew_due = False, True, now + self._heartbeat / _RENEWALS
            if self._lease.renew(state.term, state.author) and time.monotonic() - now <= self._lease.slack:
                self._missed = False
                self._tell()
        if unsaved := dict(self._unsaved):
            oldest = self._saved[: max(0, len(self._saved) + len(unsaved) - _MAX_HISTORY)]
            saved = {key: _encoded(line) for key, line in unsaved.items()}
            self._api.patch(self._secret, {"data": saved | dict.fromkeys(oldest)})
            self._saved = [*self._saved[len(oldest) :], *unsaved]
            for key in unsaved:
                self._unsaved.pop(key)
        if leads and now >= self._look_due:
            self._look_due = now + _LOOK
            for pod, lost in list(self._lost.items()):
                if now - lost > _GIVE_UP or (now - lost > _REPLACE and self._lease.replace_pod(pod)):
                    del self._lost[pod]

    def _tell(self, *, from_watch: bool = False) -> None:
        """Tell the agent the state. Its own renewals come back through the watch, perhaps late: they prove nothing."""
        with self._telling:
            state = self._lease.state
            news = (state.term, state.author, state.offered, state.nodes)
            if from_watch and self.leads and news == self._told:
                return
            self._told = news
            self.answers.put(
                protocol.RegistryState(
                    term=state.term,
                    author=state.author,
                    offered=state.offered,
                    nodes={str(node): info for node, info in state.nodes.items()},
                    touches=self._lease.renewals,
                )
            )


def _patiently(ask: Callable[[], T]) -> T:
    """The answer of the API server, as soon as it can be reached."""
    while True:
        try:
            return ask()
        except OSError:
            pass
        except ApiError as error:
            if error.status < http.client.INTERNAL_SERVER_ERROR and error.status != http.client.TOO_MANY_REQUESTS:
                raise RunError(
                    f"The Kubernetes API refuses what this pod needs: {error}. If cluster.kubernetes.service_account is set, give it the "
                    "rights that docs/kubernetes.md lists."
                ) from None
        time.sleep(_RETRY)


def _settings(secret: Object) -> AgentSettings | None:
    text = (secret.get("data") or {}).get("settings")
    settings = None if text is None else codec.decode(json.loads(_decoded(text)))
    return settings if isinstance(settings, AgentSettings) else None


def _code(secret: Object) -> int | None:
    """The exit code of a run that is over."""
    text = (secret.get("data") or {}).get("outcome")
    return None if text is None else int(_decoded(text))


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()


def _drain(queue: SimpleQueue[T]) -> Iterator[T]:
    with contextlib.suppress(Empty):
        while True:
            yield queue.get_nowait()
