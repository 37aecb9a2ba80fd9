"""The registry in a folder: of all who claim a term, exactly one has it, whatever else lies there and however full the disk is; and records on
their way to the controller."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.control.election import LeaderClient, RecordQueue
from phalanx.control.protocol import NodeInfo, Record
from phalanx.control.registry import FolderRegistry
from phalanx.control.store_server import KeyValueStore
from phalanx.events.rundir import RunDir
from phalanx.host.env import python_env
from phalanx.spec.run import Resilience


def registry(folder: Path) -> FolderRegistry:
    return FolderRegistry(RunDir(folder))


def claim(claims: FolderRegistry, term: int, author: str) -> bool:
    return asyncio.run(claims.claim(term, author))


def test_terms_are_claimed_in_order(tmp_path: Path) -> None:
    claims = registry(tmp_path)
    assert claims.newest() == (0, "")
    assert claim(claims, 1, "0-a1") and claims.newest() == (1, "0-a1")
    assert claim(claims, 1, "0-a1"), "its own"
    assert not claim(claims, 1, "1-b2") and claims.newest() == (1, "0-a1")
    assert claim(claims, 2, "1-b2") and registry(tmp_path).newest() == (2, "1-b2")
    assert claim(claims, 123456, "0-a1") and claims.newest() == (123456, "0-a1")
    assert os.readlink(claims.folder / "term-00002") == "1-b2"


def test_exactly_one_of_many_concurrent_claims_succeeds(tmp_path: Path) -> None:
    """Eight processes, each claiming whatever is free next, a hundred terms together: no term has two authors who think it theirs."""
    claims, pids = registry(tmp_path), []
    for node in range(8):
        if not (pid := os.fork()):
            try:
                won = []
                while (newest := claims.newest())[0] < 100:
                    if claim(claims, newest[0] + 1, f"{node}-x"):
                        won.append(newest[0] + 1)
                (tmp_path / f"{node}.json").write_text(json.dumps(won))
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    won = {node: json.loads((tmp_path / f"{node}.json").read_text()) for node in range(8)}
    assert sorted(term for terms in won.values() for term in terms) == list(range(1, 101))
    assert all(claims._author(term) == f"{node}-x" for node, terms in won.items() for term in terms)


@pytest.mark.parametrize("junk", ["file", "folder", "../../etc/passwd", "0-a1\n", "0 a1", "ä-1", "a" * 51])
def test_invalid_term_files_have_no_author_and_stop_no_election(tmp_path: Path, junk: str) -> None:
    claims = registry(tmp_path)
    claim(claims, 1, "0-a1")
    taken = claims.folder / "term-00002"
    if junk == "file":
        taken.write_text("1-b2")
    elif junk == "folder":
        taken.mkdir()
    else:
        taken.symlink_to(junk)
    for name in ("term-3", "term-", "term-00003.tmp", "xterm-00003", "term-0000000003", "term-000003", "term-٠٠٠٠٣"):
        (claims.folder / name).symlink_to("1-b2")
    assert claims.newest() == (2, "")
    assert not claim(claims, 2, "1-b2")
    assert claim(claims, 3, "1-b2") and claims.newest() == (3, "1-b2")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EIO])
def test_lost_race_on_a_network_file_system_is_a_lost_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """sshfs answers EPERM instead of EEXIST, and a network may lose the answer to a link that it has made."""
    claims, symlink = registry(tmp_path), os.symlink

    def slow(author: str, path: Path) -> None:
        if not os.path.lexists(path):
            symlink(winner, path)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "symlink", slow)
    winner = "1-b2"
    assert not claim(claims, 1, "0-a1") and claims.newest() == (1, "1-b2")
    winner = "0-a1"
    assert claim(claims, 2, "0-a1") and claims.newest() == (2, "0-a1")
    monkeypatch.setattr(os, "symlink", lambda author, path: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    with pytest.raises(OSError, match=os.strerror(code)):
        claim(claims, 3, "0-a1")


def test_term_is_offered_once(tmp_path: Path) -> None:
    claims = registry(tmp_path)
    claim(claims, 1, "0-a1")
    assert not claims.offered(1)
    claims.offer(1)
    claims.offer(1)
    assert claims.offered(1) and not claims.offered(2) and claims.newest() == (1, "0-a1")


def test_author_names_are_restricted_to_plain_characters(tmp_path: Path) -> None:
    for name in ("", "a/b", "..", "a b", "a" * 51, "a\n"):
        with pytest.raises(AssertionError):
            claim(registry(tmp_path), 1, name)


def test_nodes_are_announced_for_this_user_alone(tmp_path: Path) -> None:
    claims = registry(tmp_path)
    first, again, other = (NodeInfo(name=name, address=["10.0.0.1", 3], pid=7) for name in ("3-a", "3-b", "12-c"))
    old = os.umask(0)
    try:
        for node, info in ((3, first), (3, again), (12, other)):
            claims.announce(node, info)
    finally:
        os.umask(old)
    assert claims.announced() == {3: again, 12: other}
    assert {path.name: path.stat().st_mode & 0o777 for path in claims.folder.iterdir()} == {
        "node-00003.json": 0o600,
        "node-00012.json": 0o600,
    }


def test_invalid_node_files_are_ignored(tmp_path: Path) -> None:
    claims = registry(tmp_path)
    info = NodeInfo(name="0-a", address=["127.0.0.1", 1], pid=1)
    claims.announce(0, info)
    whole = (claims.folder / "node-00000.json").read_bytes()
    junk = (
        b"",
        b"{",
        b"{}",
        b"[1]",
        b"\xff\xfe",
        b"[" * 60_000,
        whole[:-1] + b', "more": 1}',
        whole + b" " * (65 << 10) + b"x",
    )
    for number, text in enumerate(junk, start=1):
        (claims.folder / f"node-{number:05d}.json").write_bytes(text)
    os.mkfifo(claims.folder / "node-00010.json")
    (claims.folder / "node-00011.json").mkdir()
    (claims.folder / "node-00012.json").symlink_to(claims.folder / "node-00000.json")
    (claims.folder / "node-5.json").write_bytes(whole)
    (claims.folder / ".node-00013.77").write_bytes(whole)
    assert claims.announced() == {0: info}


def test_record_that_was_not_confirmed_is_sent_to_the_next_controller() -> None:
    queue, records = RecordQueue(), [Record(line=str(number)) for number in range(5)]
    first: list[Record] = []
    second: list[Record] = []
    queue.add(records[0])
    queue.connect(first.append)
    queue.add(records[1])
    queue.add(records[2])
    assert first == records[:3]
    queue.confirm(2)
    queue.connect(None)
    queue.add(records[3])
    queue.connect(second.append)
    queue.add(records[4])
    assert second == records[2:]
    queue.confirm(3)
    third: list[Record] = []
    queue.connect(third.append)
    assert not third


def test_node_that_is_ready_first_does_not_sleep_while_node_0_claims(tmp_path: Path) -> None:
    """It would wait 20 s for node 0, which is loading. Here node 0 claims the first term a moment later and dies."""
    terms, led = registry(tmp_path), []
    agent: Any = SimpleNamespace(
        registry=terms,
        records=RecordQueue(),
        name="1-b2",
        node=1,
        token="t",
        outcome=None,
        stores={},
        run=SimpleNamespace(resilience=Resilience()),
        reachable=lambda _: True,
    )

    async def lead(term: int) -> None:
        led.append(term)
        agent.outcome = "done"

    async def scenario() -> None:
        for node, name in enumerate(("0-a1", "1-b2")):
            terms.announce(node, NodeInfo(name=name, address=["127.0.0.1", 1], pid=1))  # nobody listens there

        async def claim_later() -> None:
            await asyncio.sleep(0.3)
            await terms.claim(1, "0-a1")

        async with asyncio.timeout(15):
            await asyncio.gather(LeaderClient(agent, lead).follow(), claim_later())

    asyncio.run(scenario())
    assert led == [2]


def test_node_that_cannot_claim_follows_the_author_again(tmp_path: Path) -> None:
    """It was cut off: the author, which it took for lost, has led all the time, and the registry refuses the next term."""
    asked: list[int] = []
    agent: Any = SimpleNamespace(
        records=RecordQueue(),
        name="1-b2",
        node=1,
        token="t",
        outcome=None,
        stores={},
        run=SimpleNamespace(resilience=Resilience()),
        reachable=lambda _: True,
    )

    class Refusing(FolderRegistry):
        async def claim(self, term: int, author: str) -> bool:
            return False

        def info(self, node: int) -> NodeInfo | None:
            asked.append(node)
            if len(asked) == 3:
                agent.outcome = "done"
            return super().info(node)

    async def lead(term: int) -> None:
        raise AssertionError("it leads without a term")

    agent.registry = Refusing(RunDir(tmp_path))
    claim(registry(tmp_path), 1, "0-a1")
    for node, name in enumerate(("0-a1", "1-b2")):
        agent.registry.announce(node, NodeInfo(name=name, address=["127.0.0.1", 1], pid=1))  # nobody listens there

    async def scenario() -> None:
        async with asyncio.timeout(60):
            await LeaderClient(agent, lead).follow()

    asyncio.run(scenario())
    assert asked == [0, 0, 0]


def test_author_that_is_cut_off_from_the_registry_keeps_its_generation(tmp_path: Path) -> None:
    """It may lead again, and ranks use the store of their generation when they save. If another node leads, they must learn that."""
    agent: Any = SimpleNamespace(
        name="0-a1", node=0, outcome=None, stores={0: KeyValueStore()}, records=RecordQueue(), token="t"
    )
    agent.run, agent.reachable = SimpleNamespace(resilience=Resilience()), lambda _: True
    seen: list[str] = []

    class Unreachable(FolderRegistry):
        def holds(self, term: int, author: str) -> bool:
            answer = agent.stores[0].now({"op": "count"})
            seen.append("over" if "over" in answer else "open")
            if len(seen) == 3:
                (self.folder / "term-00002").symlink_to("1-b2")
            return False

        def info(self, node: int) -> NodeInfo | None:
            agent.outcome = "done"
            return None

    async def lead(term: int) -> None:
        raise AssertionError("it does not know whether it leads")

    async def scenario() -> None:
        async with asyncio.timeout(60):
            await LeaderClient(agent, lead).follow()

    agent.registry = Unreachable(RunDir(tmp_path))
    claim(registry(tmp_path), 1, "0-a1")
    asyncio.run(scenario())
    assert seen == ["open"] * 3 and "over" in agent.stores[0].now({"op": "count"})


FULL = """
import asyncio, os, subprocess, sys
from pathlib import Path
from phalanx.control.protocol import NodeInfo
from phalanx.control.registry import FolderRegistry
from phalanx.control.store_server import KeyValueStore
from phalanx.events.rundir import RunDir
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder], check=True)
claims = FolderRegistry(RunDir(folder))
first, second = (NodeInfo(name=name, address=[], pid=1) for name in ("0-a", "0-b"))
claims.announce(0, first)
try:
    (folder / "filler").write_bytes(bytes(1 << 20))
except OSError:
    pass
try:
    claims.announce(0, second)
except OSError as error:
    print(error.strerror)
assert asyncio.run(claims.claim(1, "0-a1")) and not asyncio.run(claims.claim(1, "1-b2")) and claims.newest() == (1, "0-a1")
assert claims.announced() == {0: first} and sorted(os.listdir(claims.folder)) == ["node-00000.json", "term-00001"]
print("claimed")
"""


def test_a_full_disk_stops_no_election(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no file system of its own can be had here")
    command = [*alone, sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=python_env())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "No space left on device\nclaimed\n"
