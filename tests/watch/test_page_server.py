"""The server of the page over real connections: what it answers, whom it refuses, and what it withstands."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from watch_runs import Client, Record, lines, serving, started, step, write_run

from phalanx.spec.check_watch import is_loopback
from phalanx.watch import page_server
from phalanx.watch.page_access import Access, new_token

SAMPLE: list[Record] = [started(), *(step(number) for number in range(1, 8))]


def refuse(value: str) -> float:
    raise AssertionError(f"{value} is not JSON")


def test_views_are_json_and_an_unchanged_one_is_not_sent_again(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", SAMPLE)
    with serving(tmp_path / "runs") as client:
        for view in page_server._VIEWS:
            answer = client.get(f"/api/view?run=a&view={view}")
            assert answer.status == 200 and json.loads(answer.body, parse_constant=refuse)["header"]["step"] == 7
        again = client.get(f"/api/view?run=a&view={view}", If_None_Match=answer.headers["etag"])
        assert again.status == 304 and not again.body
        with (tmp_path / "runs" / "a" / "events.jsonl").open("ab") as file:
            file.write(lines([step(8)]))
        time.sleep(0.3)
        changed = client.get(f"/api/view?run=a&view={view}", If_None_Match=answer.headers["etag"])
        assert changed.status == 200 and changed.json["header"]["step"] == 8


def test_the_page_itself_is_there_and_loads_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        page = client.get("/")
        assert page.status == 200 and b'src="page.js"' in page.body and b"http" not in page.body
        assert client.get("/page.js").headers["content-type"].startswith("text/javascript")
        assert client.get("/page.css").status == 200
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        head = client.get("/", method="HEAD")
        assert head.status == 200 and not head.body and head.headers["content-length"] == str(len(page.body))
        packed = client.get("/page.js", Accept_Encoding="gzip")
        assert packed.headers["content-encoding"] == "gzip" and len(packed.body) < 80_000


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_changed(tmp_path: Path, method: str) -> None:
    with serving(tmp_path) as client:
        answer = client.get("/api/runs", method=method)
        assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "target",
    [
        "/../secret.txt", "/..%2fsecret.txt", "/static/../../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/etc/passwd", "/page.js/../../secret.txt",
        "/a/events.jsonl", "/build.json", "/index.html%00", "/api/view?run=../secret&view=overview", "/api/view?run=a&view=../../secret",
        "/api/view?run=a%00&view=overview", "/api/view", "/api/view?run=a", "/api/compare?run=/etc", "/api/nothing",
    ],
)  # fmt: skip
def test_no_path_leads_out(tmp_path: Path, target: str) -> None:
    (tmp_path / "secret.txt").write_text("a secret")
    write_run(tmp_path / "secret", SAMPLE)
    write_run(tmp_path / "runs" / "a", SAMPLE)
    with serving(tmp_path / "runs") as client:
        answer = client.get(target)
        assert answer.status in (400, 404) and b"secret" not in answer.body.lower()


@pytest.mark.parametrize(
    "fields",
    [
        "from=x",
        "from=nan",
        "to=inf",
        "width=-1",
        "width=1e9",
        "width=²",
        "view=rank&rank=-1",
        "view=rank&rank=99999999",
        "view=rank",
    ],
)
def test_fields_that_are_no_numbers_are_refused(tmp_path: Path, fields: str) -> None:
    write_run(tmp_path / "a", SAMPLE)
    with serving(tmp_path) as client:
        assert client.get(f"/api/view?run=a&view=overview&{quote(fields, safe='=&')}").status == 400
        assert client.view("a", "overview")["header"]["step"] == 7


def raw(client: Client, data: bytes, wait: float = 10.0) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=wait) as connection:
        connection.sendall(data)
        answer = b""
        while block := connection.recv(65536):
            answer += block
        return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", b"413"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"413"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n bad header: 1\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"403"),
        (b"GET /?" + b"&".join(b"a=1" for _ in range(100)) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /%ff HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", b"200"),
    ],
)  # fmt: skip
def test_odd_requests_are_answered_and_the_connection_is_closed(tmp_path: Path, data: bytes, status: bytes) -> None:
    with serving(tmp_path) as client:
        assert raw(client, data).startswith(b"HTTP/1.1 " + status)
        assert client.get("/api/runs").status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("127.0.0.1:8686", 200), ("[::1]:8686", 200), ("LOCALHOST:1", 200), ("evil.example", 403), ("evil.example:8686", 403),
        ("localhost.evil.example", 403), ("192.168.1.5", 403), ("127.0.0.1.evil.example", 403), ("", 403),
    ],
)  # fmt: skip
def test_a_foreign_name_of_this_machine_is_refused(tmp_path: Path, host: str, status: int) -> None:
    with serving(tmp_path) as client:
        assert client.get("/", Host=host).status == status


def test_elsewhere_than_on_loopback_a_token_is_demanded(tmp_path: Path) -> None:
    write_run(tmp_path / "a", SAMPLE)
    token = new_token()
    with serving(tmp_path, Access("127.0.0.1", token)) as client:
        for target in (
            "/",
            "/page.js",
            "/api/runs",
            "/api/view?run=a&view=overview",
            "/?token=wrong",
            f"/?token={token[:-1]}",
            "/?token=%ff%fe",
        ):
            refused = client.get(target)
            assert refused.status == 401 and b"loss" not in refused.body and token.encode() not in refused.body
        entered = client.get(f"/?token={token}&x=1")
        assert entered.status == 303 and entered.headers["location"] == "/?x=1"
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert client.get("/api/runs", Cookie=cookie.partition(";")[0]).status == 200
        assert client.get("/api/runs", Authorization=f"Bearer {token}").status == 200
        assert client.get("/api/runs", Cookie=cookie.partition("=")[0] + "=wrong").status == 401
        assert client.get("/api/runs", Authorization="Bearer ").status == 401


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node-1", "localhost.example")))
    everywhere = Access("0.0.0.0", new_token())
    assert (
        everywhere.knows_host("10.0.0.7:8686")
        and everywhere.knows_host(socket.gethostname())
        and not everywhere.knows_host("evil.example")
    )


def test_a_taken_port_is_left_to_its_owner(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        import asyncio

        from phalanx.watch.followed_run import RunFolder

        async def start() -> int:
            server, port = await page_server.PageServer(RunFolder(tmp_path), Access("127.0.0.1")).start(first.port)
            server.close()
            return port

        assert first.port < asyncio.run(start()) < first.port + 100


def hostile_records() -> bytes:
    name = "<img src=x onerror=alert(1)>"
    records = [
        started(compute=name, device=name, version=name),
        {"event": "worker_started", "time": 1.0, "rank": 0, "host": name, "pid": 1, "device": name},
        step(1), step(2, loss="nan", mfu="much"), step(3, time=-1e15), step(4, time=1e15),
        {"event": "sampled", "time": 1.0, "step": 1, "prompt": name, "text": "\u0000\u202e" + name, "tokens": 1, "seconds": 1.0},
        {"event": "failure_noticed", "time": 1.0, "number": 1, "cause": name, "message": name, "rank": 0, "step": 2, "traceback": 100_000 * "x"},
        {"event": "evaluated", "time": 1.0, "step": 2, "loss": 1.0, "sources": {name: {"loss": "nan"}}},
    ]  # fmt: skip
    return (
        lines(records)
        + b'{"event": "warned", "message": "'
        + 2_000_000 * b"y"
        + b'"}\n'
        + b"\x00\xff\xfe\n"
        + 100 * b"{"
        + b"\n"
        + lines([step(5)])
    )


def test_hostile_events_are_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>a&b</b>", [])
    (run / "events.jsonl").write_bytes(hostile_records())
    (run / "run.toml").write_bytes(b"\xff = not toml")
    with serving(tmp_path) as client:
        name = client.get("/api/runs").json["runs"][0]["name"]
        for view in (*page_server._VIEWS, "rank&rank=0"):
            answer = client.get(f"/api/view?run={quote(name)}&view={view}")
            assert answer.status == 200 and answer.headers["content-type"] == "application/json"
            header = json.loads(answer.body, parse_constant=refuse)["header"]
            assert header["step"] == 5 and header["unreadable"] == 3
        assert len(client.get(f"/api/view?run={quote(name)}&view=failures").body) < 60_000


def test_a_view_that_fails_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(run: object, window: object) -> dict[str, object]:
        raise KeyError("planted")

    write_run(tmp_path / "a", SAMPLE)
    monkeypatch.setitem(page_server._VIEWS, "samples", broken)
    with serving(tmp_path) as client:
        answer = client.get("/api/view?run=a&view=samples")
        assert answer.status == 500 and b"planted" not in answer.body
        assert client.view("a", "overview")["header"]["step"] == 7
    assert "planted" in capfd.readouterr().err


def test_slow_readers_and_many_clients_leave_others_alone(tmp_path: Path) -> None:
    """150 connections that say nothing, or ask and do not read; then 200 clients at the same time."""
    write_run(tmp_path / "a", [started(), *(step(number) for number in range(1, 3000))])
    target = b"GET /api/view?run=a&view=overview&width=2000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(tmp_path) as client:
        threads = threading.active_count()
        held = []
        for number in range(150):
            connection = socket.create_connection(("127.0.0.1", client.port))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall((b"", b"GET / HT", 5 * target)[number % 3])
            held.append(connection)
        try:
            with ThreadPoolExecutor(40) as pool:
                answers = list(pool.map(lambda _: client.view("a", "overview")["header"]["step"], range(200)))
            assert answers == 200 * [2999]
            assert threading.active_count() <= threads + 4
        finally:
            for connection in held:
                connection.close()


def test_too_many_connections_are_refused_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_MAX_CONNECTIONS", 5)
    with serving(tmp_path) as client:
        held = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(5)]
        deadline = time.monotonic() + 20
        while client.get("/api/runs").status != 503:
            assert time.monotonic() < deadline
        for connection in held:
            connection.close()
        while client.get("/api/runs").status != 200:
            assert time.monotonic() < deadline


def test_silent_connections_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(page_server, "_HEAD_SECONDS", 0.2)
    with serving(tmp_path) as client:
        assert raw(client, b"") == b""
        assert raw(client, b"GET / HTTP/1.1\r\nHost: loc") == b""
