"""Terms: of all who claim one, exactly one has it, whatever else lies in the folder and however full the disk is."""

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

from phalanx.control.election import LeaderClient, Terms
from phalanx.host.env import python_env
from phalanx.spec.run import Resilience


def test_terms_are_claimed_in_order(tmp_path: Path) -> None:
    claims = Terms(tmp_path / "control")
    assert claims.newest() == (0, "")
    assert claims.claim(1, "0-a1") and claims.newest() == (1, "0-a1")
    assert claims.claim(1, "0-a1"), "its own"
    assert not claims.claim(1, "1-b2") and claims.newest() == (1, "0-a1")
    assert claims.claim(2, "1-b2") and Terms(tmp_path / "control").newest() == (2, "1-b2")
    assert claims.claim(123456, "0-a1") and claims.newest() == (123456, "0-a1")
    assert os.readlink(tmp_path / "control/term-00002") == "1-b2"


def test_exactly_one_of_many_concurrent_claims_succeeds(tmp_path: Path) -> None:
    """Eight processes, each claiming whatever is free next, a hundred terms together: no term has two authors who think it theirs."""
    claims, pids = Terms(tmp_path / "control"), []
    for node in range(8):
        if not (pid := os.fork()):
            try:
                won = []
                while (newest := claims.newest())[0] < 100:
                    if claims.claim(newest[0] + 1, f"{node}-x"):
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
    claims = Terms(tmp_path)
    claims.claim(1, "0-a1")
    taken = tmp_path / "term-00002"
    if junk == "file":
        taken.write_text("1-b2")
    elif junk == "folder":
        taken.mkdir()
    else:
        taken.symlink_to(junk)
    for name in ("term-3", "term-", "term-00003.tmp", "xterm-00003", "term-0000000003", "term-000003", "term-٠٠٠٠٣"):
        (tmp_path / name).symlink_to("1-b2")
    assert claims.newest() == (2, "")
    assert not claims.claim(2, "1-b2")
    assert claims.claim(3, "1-b2") and claims.newest() == (3, "1-b2")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EIO])
def test_lost_race_on_a_network_file_system_is_a_lost_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """sshfs answers EPERM instead of EEXIST, and a network may lose the answer to a link that it has made."""
    claims, symlink = Terms(tmp_path), os.symlink

    def slow(author: str, path: Path) -> None:
        if not os.path.lexists(path):
            symlink(winner, path)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "symlink", slow)
    winner = "1-b2"
    assert not claims.claim(1, "0-a1") and claims.newest() == (1, "1-b2")
    winner = "0-a1"
    assert claims.claim(2, "0-a1") and claims.newest() == (2, "0-a1")
    monkeypatch.setattr(os, "symlink", lambda author, path: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    with pytest.raises(OSError, match=os.strerror(code)):
        claims.claim(3, "0-a1")


def test_term_is_offered_once(tmp_path: Path) -> None:
    claims = Terms(tmp_path)
    claims.claim(1, "0-a1")
    assert not claims.offered(1)
    claims.offer(1)
    claims.offer(1)
    assert claims.offered(1) and not claims.offered(2) and claims.newest() == (1, "0-a1")


def test_author_names_are_restricted_to_plain_characters(tmp_path: Path) -> None:
    for name in ("", "a/b", "..", "a b", "a" * 51, "a\n"):
        with pytest.raises(AssertionError):
            Terms(tmp_path).claim(1, name)


def test_nodes_are_announced_for_this_user_alone(tmp_path: Path) -> None:
    claims = Terms(tmp_path)
    old = os.umask(0)
    try:
        claims.announce(3, {"address": ["127.0.0.1", 1]})
        claims.announce(3, {"address": ["127.0.0.1", 2], "incarnation": "b"})
        claims.announce(12, {"address": ["10.0.0.1", 3]})
    finally:
        os.umask(old)
    assert claims.announced() == {
        3: {"address": ["127.0.0.1", 2], "incarnation": "b"},
        12: {"address": ["10.0.0.1", 3]},
    }
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "node-00003.json": 0o600,
        "node-00012.json": 0o600,
    }
    with pytest.raises(AssertionError, match="never written"):
        claims.announce(3, {"token": "secret"})


def test_invalid_node_files_are_ignored(tmp_path: Path) -> None:
    claims = Terms(tmp_path)
    claims.announce(0, {"here": 1})
    for number, text in enumerate((b"", b"{", b"[1]", b"\xff\xfe", b"[" * 60_000, b"{}" + b" " * (65 << 10) + b"x"), start=1):
        (tmp_path / f"node-{number:05d}.json").write_bytes(text)
    os.mkfifo(tmp_path / "node-00010.json")
    (tmp_path / "node-00011.json").mkdir()
    (tmp_path / "node-00012.json").symlink_to(tmp_path / "node-00000.json")
    (tmp_path / "node-5.json").write_text("{}")
    (tmp_path / ".node-00013.77").write_text("{}")
    assert claims.announced() == {0: {"here": 1}}


def test_node_that_is_ready_first_does_not_sleep_while_node_0_claims(tmp_path: Path) -> None:
    """It would wait 20 s for node 0, which is loading. Here node 0 claims the first term a moment later and dies."""
    terms, led = Terms(tmp_path), []
    agent: Any = SimpleNamespace(
        terms=terms,
        name="1-b2",
        node=1,
        token="t",
        outcome=None,
        run=SimpleNamespace(resilience=Resilience()),
        reachable=lambda _: True,
    )

    async def lead(term: int) -> None:
        led.append(term)
        agent.outcome = "done"

    async def scenario() -> None:
        terms.announce(0, {"name": "0-a1", "address": ["127.0.0.1", 1]})  # nobody listens there
        terms.announce(1, {"name": "1-b2", "address": ["127.0.0.1", 1]})
        asyncio.get_running_loop().call_later(0.3, terms.claim, 1, "0-a1")
        async with asyncio.timeout(15):
            await LeaderClient(agent, lead).follow()

    asyncio.run(scenario())
    assert led == [2]


FULL = """
import os, subprocess, sys
from pathlib import Path
from phalanx.control.election import Terms
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder], check=True)
claims = Terms(folder / "control")
claims.announce(0, {"address": 1})
try:
    (folder / "filler").write_bytes(bytes(1 << 20))
except OSError:
    pass
try:
    claims.announce(0, {"address": 2})
except OSError as error:
    print(error.strerror)
assert claims.claim(1, "0-a1") and not claims.claim(1, "1-b2") and claims.newest() == (1, "0-a1")
assert claims.announced() == {0: {"address": 1}} and sorted(os.listdir(claims.folder)) == ["node-00000.json", "term-00001"]
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
