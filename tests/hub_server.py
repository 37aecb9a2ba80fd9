"""A server that speaks the protocol of the Hugging Face hub, as far as `huggingface_hub` and `datasets` use it: repositories with branches and
commits, files with ETags, large files behind a redirect, private and gated repositories, uploads. Nothing leaves the machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_this_test"
LARGE = (".safetensors", ".parquet", ".bin")
"""Endings of files that the hub stores elsewhere (LFS)."""
_API = re.compile(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)/(revision|tree|preupload|commit|branch|paths-info)/(.+)")
_INFO = re.compile(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)")
_RESOLVE = re.compile(r"/(datasets/)?([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)")
_BATCH = re.compile(r"/(.+)\.git/info/lfs/objects/batch")


@dataclass
class Repository:
    """Files of every commit, and the commits of branches."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make these the files of a branch."""
        content = b"".join(name.encode() + hashlib.sha1(data).digest() for name, data in sorted(files.items()))
        sha = hashlib.sha1(content + str(len(self.commits)).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        return sha

    def find(self, revision: str) -> str | None:
        revision = unquote(revision)
        return revision if revision in self.commits else self.branches.get(revision)


class Hub:
    """The contents of the server, what it was asked, and its faults."""

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.asked: list[str] = []
        """METHOD PATH, and the range if one was given."""
        self.cut: int | None = None
        """Bytes after which the answer with a large file ends early."""
        self.down = False
        """Answers 503 to everything."""
        self.uploaded: dict[str, bytes] = {}
        self.url = ""

    def add(self, name: str, files: Mapping[str, bytes] | Path, *, dataset: bool = False, **settings: bool) -> Repository:
        """A repository with the files of a folder, or with these."""
        if isinstance(files, Path):
            files = {file.name: file.read_bytes() for file in files.iterdir() if file.is_file()}
        repository = Repository(**settings)
        repository.commit(files)
        (self.datasets if dataset else self.models)[name] = repository
        return repository

    def environment(self, cache: Path, *, token: str | None = None, offline: bool = False) -> dict[str, str]:
        """The variables with which a program uses this hub, with a cache of its own."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        variables |= {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        return variables | ({"HF_TOKEN": token} if token else {})


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub at a port of its own."""
    hub = Hub()

    class Handler(_Handler):
        contents = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    contents: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, url = self.contents, urlsplit(self.path)
        path, asked_range = unquote(url.path), self.headers.get("Range")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {path}{f' {asked_range}' if asked_range else ''}")
        if hub.down:
            self._send(503, {"error": "down for maintenance"})
        elif (token := self.headers.get("Authorization")) not in (None, f"Bearer {TOKEN}"):
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif path.startswith("/stored/"):
            self._send_large(path.rpartition("/")[2])
        elif path.startswith("/upload/"):
            hub.uploaded[path.rpartition("/")[2]] = body
            self._send(200, {})
        elif path == "/api/whoami-v2":
            user = {"name": "somebody", "type": "user", "orgs": [{"name": "org"}], "auth": {"accessToken": {"role": "write"}}}
            self._send(200, user) if token else self._refuse(401, None, "Unauthorized")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif (match := _BATCH.fullmatch(path)) is not None:
            self._batch(json.loads(body))
        elif (match := _RESOLVE.fullmatch(path)) is not None:
            self._resolve(*match.groups())
        elif (match := _API.fullmatch(path) or _INFO.fullmatch(path)) is not None:
            self._api(match.groups(), parse_qs(url.query), body)
        else:
            self._refuse(404, "EntryNotFound", f"no such page: {path}")

    def _repository(self, kind: str, name: str, *, content: bool = False) -> Repository | None:
        """Refuses a request for a repository that does not exist, or that is closed. `content`: its files are wanted."""
        repository = (self.contents.datasets if kind == "datasets" else self.contents.models).get(name)
        known = self.headers.get("Authorization") is not None
        if repository is None or (repository.private and not known):
            self._refuse(404 if known else 401, "RepoNotFound", "Repository not found")
            return None
        if repository.gated and content:
            self._refuse(403, "GatedRepo", f"Access to model {name} is restricted.")
            return None
        return repository

    def _api(self, groups: tuple[str, ...], query: dict[str, list[str]], body: bytes) -> None:
        kind, name, what, revision = (*groups, "revision", "main")[:4]
        what, _, inside = (what, "", "") if what != "tree" else (what, *revision.partition("/")[1:])
        if (repository := self._repository(kind, name)) is None:
            return
        revision = revision.partition("/")[0]
        if what == "branch":
            repository.branches[revision] = repository.branches["main"]
            return self._send(200, {})
        sha = repository.find(revision)
        if sha is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[sha]
        if what == "revision":
            siblings = [{"rfilename": path} for path in files]
            tags = {"id": name, "sha": sha, "siblings": siblings, "private": repository.private, "gated": False, "tags": []}
            return self._send(200, tags | {"downloads": 0, "likes": 0})
        if what == "tree":
            found = [_entry(path, data) for path, data in files.items() if path.startswith(inside)]
            return self._send(200, found)
        if what == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            return self._send(200, [_entry(path, files[path]) for path in wanted if path in files])
        if what == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._send(200, {"files": modes})
        return self._commit(repository, name, revision, dict(files), body)

    def _commit(self, repository: Repository, name: str, branch: str, files: dict[str, bytes], body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.contents.uploaded[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(files, branch)
        self._send(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.contents.url}/{name}/commit/{sha}"})

    def _create(self, wanted: dict[str, Any]) -> None:
        if self.headers.get("Authorization") is None:
            return self._refuse(401, None, "Unauthorized")
        name = f"{wanted.get('organization') or 'somebody'}/{wanted['name']}"
        if not name.startswith(("org/", "somebody/")):
            return self._refuse(403, None, f"You don't have the rights to create a model under the namespace {name}")
        if name in self.contents.models:
            return self._send(409, {"error": "You already created this model repo", "url": f"{self.contents.url}/{name}"})
        private = wanted.get("private") is True or wanted.get("visibility") == "private"
        self.contents.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        return self._send(200, {"url": f"{self.contents.url}/{name}", "name": name})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            upload = {"href": f"{self.contents.url}/upload/{item['oid']}", "header": {}}
            objects.append({"oid": item["oid"], "size": item["size"], "actions": {"upload": upload}})
        self._send(200, {"transfer": "basic", "objects": objects})

    def _resolve(self, dataset: str | None, name: str, revision: str, path: str) -> None:
        if (repository := self._repository("datasets" if dataset else "models", name, content=True)) is None:
            return
        sha = repository.find(revision)
        if sha is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = repository.commits[sha].get(path)
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        if path.endswith(LARGE):
            oid = hashlib.sha256(data).hexdigest()
            self.contents.uploaded[oid] = data
            storage = self.contents.url.replace("127.0.0.1", "localhost")  # another host, as on the hub
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data)), "Location": f"{storage}/stored/{oid}"}
            return self._send(302, b"", linked | {"X-Repo-Commit": sha})
        self._send_part(data, {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": sha})

    def _send_large(self, oid: str) -> None:
        self._send_part(self.contents.uploaded[oid], {"ETag": f'"{oid}"'}, self.contents.cut)

    def _send_part(self, data: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        status, size, headers = 200, len(data), headers | {"Accept-Ranges": "bytes"}
        if (match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")) is not None:
            first, last = int(match[1]), int(match[2] or size - 1)
            status, data = 206, data[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._send(status, data, headers, cut)

    def _refuse(self, status: int, code: str | None, message: str, more: dict[str, str] | None = None) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, {"error": message}, headers | (more or {}))

    def _send(self, status: int, body: object, headers: Mapping[str, str] | None = None, cut: int | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(data))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None and cut < len(data):
            self.close_connection = True


def _blob(data: bytes) -> str:
    """The name that git gives a file's contents."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
