"""The Kubernetes API over HTTPS, as far as Phalanx needs it: objects, watches and the logs of pods. The standard library suffices; PyYAML reads
the kubeconfig.

The official client would be a large dependency of every image for a dozen requests, and would hide what the registry depends on: time limits,
conflicts, the end of watches.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from phalanx.host.env import kubeconfig, kubernetes_service
from phalanx.host.process_tree import run_program
from phalanx.spec.errors import RunError
from phalanx.spec.run import Kubernetes

_SECONDS = 10.0  # in which the API server answers
_WATCH_SECONDS = 60  # after which a watch is asked for again: a dead connection must not go unnoticed for long
_LOG_SILENCE = 300.0  # seconds without a line after which the log of a pod is asked for again
_PLUGIN_SECONDS = 60.0  # in which a plugin of the kubeconfig gives credentials
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MERGE = "application/merge-patch+json"

Object = dict[str, Any]
"""An object of the API, as JSON."""


class ApiError(Exception):
    """The API server refuses a request."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Change:
    """One change that a watch has seen. The first ones are the objects that were there, after a `RESET`."""

    kind: str
    """RESET (what was known before does not count any more), ADDED, MODIFIED or DELETED."""
    value: Object


class KubeApi:
    """A connection to one API server. Methods raise OSError if it cannot be reached, and ApiError if it refuses."""

    def __init__(
        self, server: str, namespace: str, *, tls: ssl.SSLContext | None = None, token: Callable[[], str | None] = lambda: None
    ):
        address = urlsplit(server)
        self.server, self.namespace = server, namespace
        self._host, self._port, self._prefix = address.hostname or "", address.port, address.path.rstrip("/")
        self._tls, self._token = (tls or ssl.create_default_context()) if address.scheme == "https" else None, token

    def get(self, path: str, *, seconds: float = _SECONDS) -> Object:
        return self._ask("GET", path, seconds=seconds)

    def find(self, path: str) -> Object | None:
        """An object; None if there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == http.client.NOT_FOUND:
                return None
            raise

    def create(self, path: str, value: Object, *, dry_run: bool = False) -> Object:
        """Create an object. `dry_run`: only check that this would succeed, unknown fields included."""
        return self._ask("POST", path + ("?dryRun=All&fieldValidation=Strict" if dry_run else ""), value)

    def replace(self, path: str, value: Object, *, seconds: float = _SECONDS) -> Object:
        """Replace an object; ApiError 409 if it is no longer the version that `value` was read as."""
        return self._ask("PUT", path, value, seconds=seconds)

    def patch(self, path: str, value: Object) -> Object:
        """Merge fields into an object. None removes a field."""
        return self._ask("PATCH", path, value, content=_MERGE)

    def delete(self, path: str, *, grace: int | None = None) -> None:
        """Delete an object, and in the background what it owns. It may be gone already."""
        options: Object = {"propagationPolicy": "Background"} | ({} if grace is None else {"gracePeriodSeconds": grace})
        try:
            self._ask("DELETE", path, options)
        except ApiError as error:
            if error.status != http.client.NOT_FOUND:
                raise

    def watch(self, path: str, query: Mapping[str, str]) -> Iterator[Change]:
        """The objects of a collection, then every change to it. Ends only with an error."""
        version: str | None = None
        while True:
            if version is None:
                listed = self.get(f"{path}?{urlencode(query)}")
                version = listed["metadata"]["resourceVersion"]
                yield Change("RESET", listed)
                for value in listed["items"]:
                    yield Change("ADDED", value)
            more = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
            try:
                for line in self.lines(
                    path, {**query, **more, "timeoutSeconds": str(_WATCH_SECONDS)}, _WATCH_SECONDS + _SECONDS
                ):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(event["object"].get("code", 500), event["object"].get("message", ""))
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield Change(event["type"], event["object"])
            except ApiError as error:
                if error.status != http.client.GONE:
                    raise
                version = None  # the server has forgotten what has happened since

    def log(self, pod: str, *, container: str, since: str | None = None, follow: bool = True) -> Iterator[tuple[str, str]]:
        """The lines that a pod has printed, each with its time; `since`: from that time on. `follow`: until the pod ends."""
        query = {"container": container, "timestamps": "true", "follow": json.dumps(follow)} | (
            {} if since is None else {"sinceTime": since}
        )
        for line in self.lines(f"{self.path('pods')}/{pod}/log", query, _LOG_SILENCE):
            stamp, _, text = line.decode(errors="replace").rstrip("\r\n").partition(" ")
            yield stamp, text

    def path(self, kind: str, group: str = "v1") -> str:
        """The collection of a kind, such as "pods", in the namespace."""
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        return f"{root}/namespaces/{self.namespace}/{kind}"

    def lines(self, path: str, query: Mapping[str, str], seconds: float) -> Iterator[bytes]:
        """The lines of an answer as they arrive; OSError after this many seconds without one."""
        with self._open("GET", f"{path}?{urlencode(query)}", None, "application/json", seconds) as answer:
            while line := answer.readline():
                yield line

    def _ask(
        self,
        method: str,
        path: str,
        value: Object | None = None,
        *,
        content: str = "application/json",
        seconds: float = _SECONDS,
    ) -> Object:
        with self._open(method, path, value, content, seconds) as answer:
            result: Object = json.loads(answer.read())
        return result

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, value: Object | None, content: str, seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection: http.client.HTTPConnection = (
            http.client.HTTPConnection(self._host, self._port, timeout=seconds)
            if self._tls is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=self._tls)
        )
        headers = {"Accept": "application/json", "Content-Type": content}
        if (token := self._token()) is not None:
            headers["Authorization"] = f"Bearer {token}"
        with contextlib.closing(connection):
            try:
                connection.request(method, self._prefix + path, None if value is None else json.dumps(value), headers)
                answer = connection.getresponse()
                if answer.status >= http.client.BAD_REQUEST:
                    text = answer.read().decode(errors="replace")
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        text = json.loads(text)["message"]
                    raise ApiError(answer.status, text or answer.reason)
                yield answer
            except http.client.HTTPException as error:
                raise ConnectionError(f"the API server's answer is cut short: {error!r}") from None


def in_cluster(namespace: str | None = None) -> KubeApi:
    """The API server as a pod sees it, with the rights of its service account; in the pod's namespace or another one."""
    service = kubernetes_service()
    if service is None or not (_ACCOUNT / "token").exists():
        raise RunError(f"This is no pod with a service account: {_ACCOUNT}/token does not exist.")
    host, port = service
    name = f"[{host}]" if ":" in host else host
    tls = ssl.create_default_context(cafile=_ACCOUNT / "ca.crt")
    # Tokens are replaced while a pod lives.
    return KubeApi(
        f"https://{name}:{port}",
        namespace or (_ACCOUNT / "namespace").read_text().strip(),
        tls=tls,
        token=lambda: (_ACCOUNT / "token").read_text().strip(),
    )


def connect(settings: Kubernetes) -> KubeApi:
    """The API server of the kubeconfig, or of the cluster in which this process is a pod. RunError says what is missing."""
    path = kubeconfig()
    if not path.exists():
        if kubernetes_service() is not None:
            return in_cluster(settings.namespace)
        raise RunError(
            f'cluster.launcher = "kubernetes" needs a kubeconfig, but there is no {path}: set KUBECONFIG to one, as `kubectl` uses it.'
        )
    try:
        return _from_kubeconfig(read_yaml(path), path, settings)
    except (KeyError, TypeError, ValueError, StopIteration, OSError) as error:
        raise RunError(f"{path} is not a valid kubeconfig ({error!r}): `kubectl config view` must accept it.") from None


def _from_kubeconfig(config: Object, path: Path, settings: Kubernetes) -> KubeApi:
    wanted = settings.context or config.get("current-context") or ""
    names = [entry["name"] for entry in config.get("contexts") or []]
    if wanted not in names:
        source = "cluster.kubernetes.context" if settings.context else "current-context"
        raise RunError(
            f'{path}: {source} = "{wanted}" is none of its contexts ({", ".join(names) or "it has none"}): set '
            "cluster.kubernetes.context to one of them."
        )
    context = _named(config["contexts"], wanted)["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config.get("users") or [], context["user"])["user"] if context.get("user") else {}
    if "exec" in user:
        user = _run_plugin(user["exec"], path)
    elif "auth-provider" in user:
        raise RunError(f"{path}: auth-provider is obsolete, and Phalanx does not support it: use an exec plugin.")
    tls = ssl.create_default_context(
        cafile=_file(path, cluster.get("certificate-authority")), cadata=_text(cluster.get("certificate-authority-data"))
    )
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    _load_client_certificate(tls, path, user)
    token_file, token = _file(path, user.get("tokenFile")), user.get("token")
    return KubeApi(
        cluster["server"],
        settings.namespace or context.get("namespace") or "default",
        tls=tls,
        token=lambda: token if token_file is None else Path(token_file).read_text().strip(),
    )


def _run_plugin(plugin: Object, path: Path) -> Object:
    """The credentials that a command of the kubeconfig gives, as the entries of a user."""
    command = [plugin["command"], *(plugin.get("args") or [])]
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    given = {entry["name"]: entry["value"] for entry in plugin.get("env") or []}
    done = run_program(command, _PLUGIN_SECONDS, env={**given, "KUBERNETES_EXEC_INFO": json.dumps(info)})
    if done.returncode:
        raise RunError(f"{path}: `{' '.join(command)}` gives no credentials: {done.stderr.strip()[-500:]}")
    status = json.loads(done.stdout)["status"]
    certificate = {
        "client-certificate-data": status.get("clientCertificateData"),
        "client-key-data": status.get("clientKeyData"),
    }
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in certificate.items() if text is not None}
    return {"token": status.get("token"), **encoded}


def _load_client_certificate(tls: ssl.SSLContext, path: Path, user: Object) -> None:
    """OpenSSL reads certificates and keys from files only."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in ("client-certificate", "client-key"):
            if (data := user.get(f"{name}-data")) is not None:
                file = Path(folder) / name
                file.touch(0o600)
                file.write_text(_text(data) or "")
                files.append(str(file))
            elif (given := _file(path, user.get(name))) is not None:
                files.append(given)
        if len(files) == 2:
            tls.load_cert_chain(*files)


def read_yaml(path: Path) -> Object:
    """A YAML file that holds an object. Raises ValueError if it does not."""
    yaml = import_yaml()
    try:
        value = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return value


def import_yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise RunError("cluster.launcher = \"kubernetes\" needs PyYAML: pip install 'phalanx[kubernetes]'.") from None
    return yaml


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


def _text(data: str | None) -> str | None:
    return None if data is None else base64.b64decode(data).decode()


def _file(kubeconfig: Path, name: str | None) -> str | None:
    """A file that the kubeconfig names; relative to it."""
    return None if name is None else str(kubeconfig.parent / name)
