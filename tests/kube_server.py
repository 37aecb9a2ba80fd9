"""As much of a Kubernetes API server as Phalanx talks to, for tests: objects with versions and conflicts, watches, merge patches, dry runs, logs.

Where `kubernetes_validate` is installed, every object that is created or replaced is validated strictly, as with fieldValidation=Strict.
"""

from __future__ import annotations

import contextlib
import copy
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

try:
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

VERSION = "1.34"
CUSTOM = ("jobsets", "rayjobs")
Object = dict[str, Any]
Key = tuple[str, str, str]
"""Group and version, plural, name; all in one namespace."""


class Refusal(Exception):
    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class KubeServer:
    """The server. Tests look at `objects`, and plant faults."""

    def __init__(self, address: str = "127.0.0.1", namespace: str = "lab", tls: ssl.SSLContext | None = None):
        self.namespace, self.objects = namespace, dict[Key, Object]()
        self.lock = threading.Condition()
        self.version, self._events = 100, list[tuple[int, str, Key, Object]]()
        self._forgotten = 0
        self.down = False
        """Every connection is dropped."""
        self.forbidden: set[tuple[str, str]] = set()
        """(verb, plural) that nobody may do."""
        self.fail_after: int | None = None
        """Creations, dry runs excluded, after which the server answers 500."""
        self.requests: list[str] = []
        self.logs: Callable[[str], Path | None] = lambda pod: None
        self._watches = 0
        self._server = ThreadingHTTPServer((address, 0), _handler(self))
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        host, port = self._server.server_address[:2]
        self.address, self.port = str(host), int(port)
        self.url = f"{'http' if tls is None else 'https'}://{self.address}:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.down = True
        self.end_watches()
        self._server.shutdown()
        self._server.server_close()

    # --- what tests do ---

    def compact(self) -> None:
        """Forget all changes up to now: watches from an older version get 410 Gone."""
        with self.lock:
            self.version += 1
            self._forgotten = self.version
            self._events.clear()
        self.end_watches()

    def end_watches(self) -> None:
        with self.lock:
            self._watches += 1
            self.lock.notify_all()

    def of_kind(self, plural: str) -> dict[str, Object]:
        with self.lock:
            return {name: copy.deepcopy(value) for (_, kind, name), value in self.objects.items() if kind == plural}

    def put(self, key: Key, value: Object) -> None:
        """Store an object as a controller would."""
        with self.lock:
            self._store(key, value)

    def update(self, key: Key, change: Callable[[Object], None]) -> None:
        with self.lock:
            if key in self.objects:
                value = copy.deepcopy(self.objects[key])
                change(value)
                self._store(key, value)

    def remove(self, key: Key) -> None:
        with self.lock:
            if (value := self.objects.pop(key, None)) is not None:
                self.version += 1
                self._note("DELETED", key, value)

    # --- requests ---

    def answer(self, method: str, group: str, parts: list[str], query: dict[str, str], body: Object | None) -> Object:
        namespace, plural, *rest = parts
        verb = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]
        if (verb, plural) in self.forbidden:
            raise Refusal(
                403, f'{plural} is forbidden: User "me" cannot {verb} resource "{plural}" in the namespace "{namespace}"'
            )
        if namespace != self.namespace:
            raise Refusal(404, f'namespaces "{namespace}" not found')
        with self.lock:
            if not rest:
                return self._create(group, plural, body or {}, query) if method == "POST" else self._list(group, plural, query)
            key, inner = (group, plural, rest[0]), rest[1:]
            if key not in self.objects:
                raise Refusal(404, f'{plural} "{rest[0]}" not found')
            now = self.objects[key]
            if method == "PUT":
                given = (body or {}).get("metadata", {}).get("resourceVersion")
                if given is not None and given != now["metadata"]["resourceVersion"]:
                    raise Refusal(409, f'Operation cannot be fulfilled on {plural} "{rest[0]}": the object has been modified')
                return self._store(key, _checked(plural, body or {}))
            if method == "PATCH":
                patch = body or {}
                patch = (
                    {"status": patch.get("status")}
                    if inner == ["status"]
                    else {k: v for k, v in patch.items() if k != "status"}
                )
                return self._store(key, _checked(plural, _merge(now, patch)))
            if method == "DELETE":
                self._delete(key)
            return copy.deepcopy(now)

    def _delete(self, key: Key) -> None:
        value = self.objects.pop(key)
        self.version += 1
        self._note("DELETED", key, value)
        for other, owned in list(self.objects.items()):  # the garbage collector
            if any(owner["uid"] == value["metadata"]["uid"] for owner in owned["metadata"].get("ownerReferences", [])):
                self._delete(other)

    def _create(self, group: str, plural: str, value: Object, query: dict[str, str]) -> Object:
        key = (group, plural, value["metadata"]["name"])
        if key in self.objects:
            raise Refusal(409, f'{plural} "{key[2]}" already exists')
        _checked(plural, value)
        if query.get("dryRun") == "All":
            return value
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise Refusal(500, "etcdserver: request timed out")
        return self._store(key, value)

    def _store(self, key: Key, value: Object) -> Object:
        value, before = copy.deepcopy(value), self.objects.get(key)
        self.version += 1
        metadata = value["metadata"]
        metadata |= {"resourceVersion": str(self.version), "namespace": self.namespace}
        metadata.setdefault("uid", uuid.uuid4().hex)
        self.objects[key] = value
        self._note("ADDED" if before is None else "MODIFIED", key, value)
        return copy.deepcopy(value)

    def _note(self, kind: str, key: Key, value: Object) -> None:
        self._events.append((self.version, kind, key, copy.deepcopy(value)))
        self.lock.notify_all()

    def _list(self, group: str, plural: str, query: dict[str, str]) -> Object:
        items = [value for (g, p, _), value in self.objects.items() if (g, p) == (group, plural) and _selected(value, query)]
        return {"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": copy.deepcopy(items)}

    def watch(self, group: str, plural: str, query: dict[str, str]) -> Iterator[Object]:
        """The changes since a version, as they happen."""
        seen, number = int(query["resourceVersion"]), self._watches
        deadline = time.monotonic() + float(query.get("timeoutSeconds", "60"))
        if seen < self._forgotten:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            return
        while time.monotonic() < deadline and self._watches == number and not self.down:
            with self.lock:
                new = [event for event in self._events if event[0] > seen]
                if not new:
                    self.lock.wait(0.2)
            for version, kind, (g, p, _), value in new:
                seen = version
                if (g, p) == (group, plural) and _selected(value, query):
                    yield {"type": kind, "object": value | {"metadata": value["metadata"] | {"resourceVersion": str(version)}}}


def _checked(plural: str, value: Object) -> Object:
    if plural not in (*CUSTOM, "pods") and kubernetes_validate is not None:
        known = {"annotations", "labels", "name", "namespace", "ownerReferences", "resourceVersion", "uid"}
        assert value["metadata"].keys() <= known, value["metadata"]
        try:
            kubernetes_validate.validate(value, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refusal(422, error.message) from None
    return value


def _merge(value: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for name, part in patch.items():
        if part is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), part)
    return merged


def _selected(value: Object, query: dict[str, str]) -> bool:
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    label, _, wanted = query.get("labelSelector", "").partition("=")
    labels = value["metadata"].get("labels", {})
    return (not name or value["metadata"]["name"] == name) and (not label or labels.get(label) == wanted)


def _handler(server: KubeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                if not server.down:
                    super().handle()

        def _serve(self) -> None:
            server.requests.append(f"{self.command} {self.path}")
            address = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            words = address.path.strip("/").split("/")
            group, parts = ("v1", words[3:]) if words[0] == "api" else ("/".join(words[1:3]), words[4:])
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if server.down:
                self.close_connection = True
                return
            try:
                if parts[-1] == "log":
                    self._log(parts[2], query)
                elif query.get("watch") == "true":
                    self._stream(json.dumps(event) + "\n" for event in server.watch(group, parts[1], query))
                else:
                    self._reply(201 if self.command == "POST" else 200, server.answer(self.command, group, parts, query, body))
            except Refusal as refusal:
                self._reply(refusal.code, {"kind": "Status", "code": refusal.code, "message": str(refusal)})

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        def _reply(self, code: int, value: Object) -> None:
            content = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, lines: Iterator[str]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                content = line.encode()
                self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def _log(self, pod: str, query: dict[str, str]) -> None:
            path = server.logs(pod)
            if path is None:
                raise Refusal(404, f'pods "{pod}" not found')
            self._stream(_log_lines(server, pod, path, query))

    return Handler


def _log_lines(server: KubeServer, pod: str, path: Path, query: dict[str, str]) -> Iterator[str]:
    """The lines of a pod's output. The file has a time before each, as a container runtime writes them."""
    number, since = server._watches, query.get("sinceTime", "")
    with path.open() as file:
        rest = ""
        while True:
            value = server.objects.get(("v1", "pods", pod))
            ended = value is None or value["status"]["phase"] in ("Succeeded", "Failed")
            block = file.read()
            *lines, rest = (rest + block).split("\n")
            for line in lines:
                if line[:19] >= since[:19]:  # whole seconds
                    yield line + "\n"
            if not block and (ended or query.get("follow") != "true" or server.down or server._watches != number):
                return
            if not block:
                time.sleep(0.05)


def kubeconfig(path: Path, server: KubeServer) -> Path:
    """A kubeconfig for the server."""
    config = {
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": server.namespace}}],
        "clusters": [{"name": "lab", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "a word"}}],
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return path
