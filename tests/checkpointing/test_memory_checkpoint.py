"""Copies in memory: what any worker, or a whole node, leaves behind when it dies is the state as it was, to the bit."""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from replica_nodes import TOKEN, Node, newest_state, nodes, nodes_of
from torch import Tensor

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.replicas import replica_index, shm_slots
from phalanx.checkpointing.replicas.copy_pace import CopyPace
from phalanx.checkpointing.replicas.memory_checkpoint import MemoryCopies, SharedStaging
from phalanx.checkpointing.replicas.replica_index import MemoryLocation
from phalanx.checkpointing.replicas.replica_server import Connection, ReplicaServer, request
from phalanx.checkpointing.replicas.shm_slots import SLOTS
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import ReplicaGroup, StateTensor
from phalanx.events import frames
from phalanx.events.frames import Address, Refused
from phalanx.events.records import Copied, Event, Warned
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.verification.rank_pool import fork

LAYOUT = Layout(data=2, shard=2, zero=2)


def train_and_die(mesh: Mesh, directory: Path, folders: list[Path]) -> None:
    """Copies of steps 1 to 3, that of step 3 also on disk; then all are killed, in the middle of training on."""
    trainer = tiny_trainer(mesh, tiny_run(), directory)
    copies = MemoryCopies(mesh, folders[mesh.rank // 2])
    for _ in range(3):
        trainer.step()
        metadata = trainer.checkpointer._metadata_on_rank_0(trainer.progress)
        copies.take(trainer.progress.step, trainer.tensors(), metadata)
        copies.release()
        copies.settle()
    trainer.save()
    trainer.step()
    mesh.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Sequence[Node]]]:
    """A checkpoint of step 3, and two nodes that have the same in memory; nobody else is alive."""
    root = tmp_path_factory.mktemp("trained")
    with nodes(root, 2) as found:
        with pytest.raises(RuntimeError, match="ended without a result"):
            run_ranks(train_and_die, 4, root / "checkpoints", [node.folder for node in found], layout=LAYOUT)
        yield root / "checkpoints", found


def restored(mesh: Mesh, place: Any, directory: Path) -> dict[str, Tensor]:
    trainer = tiny_trainer(mesh, tiny_run(), directory)
    (event,) = trainer.restore(place)
    assert (event.kind, trainer.progress.step, trainer.progress.samples) == ("restored", 3, 24)
    found = copied(trainer.tensors())
    trainer.close()
    return found


def addresses(found: Sequence[Node]) -> list[Address]:
    return [node.address for node in found]


@pytest.mark.parametrize("local", [True, False])
def test_memory_replicas_of_killed_workers_restore_bitwise(
    local: bool, trained: tuple[Path, Sequence[Node]], tmp_path: Path
) -> None:
    checkpoints, found = trained
    state = newest_state(addresses(found), TOKEN)
    assert state is not None
    assert (state.step, state.ranks, nodes_of(state)) == (3, 4, {0: (0, 1), 1: (0, 1), 2: (1, 0), 3: (1, 0)})
    place = MemoryLocation(state, TOKEN, local=local)
    saved = directory.step_dir(checkpoints, 3)
    on_disk, marker = directory.read_marker(saved), directory.read_marker(place)
    assert replace(marker, time=None) == replace(on_disk, time=None)
    directory.verify(place)
    assert differing(restored(ALONE, place, tmp_path), restored(ALONE, saved, tmp_path)) == []


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(shard=2, zero=3)])
def test_memory_replicas_restore_on_another_layout(
    layout: Layout, trained: tuple[Path, Sequence[Node]], tmp_path: Path
) -> None:
    checkpoints, found = trained
    state = newest_state(addresses(found), TOKEN)
    assert state is not None
    from_memory = run_ranks(restored, 2, MemoryLocation(state, TOKEN), tmp_path, layout=layout)
    from_disk = run_ranks(restored, 2, directory.step_dir(checkpoints, 3), tmp_path, layout=layout)
    assert [differing(*pair) for pair in zip(from_memory, from_disk, strict=True)] == [[], []]


@pytest.mark.parametrize(("steps", "rollbacks", "is_newer"), [(2, 0, False), (3, 0, False), (4, 0, True), (2, 1, True)])
def test_a_checkpoint_is_newer_by_its_rollbacks_and_then_by_its_step(
    steps: int, rollbacks: int, is_newer: bool, trained: tuple[Path, Sequence[Node]], tmp_path: Path
) -> None:
    """Than the copy of step 3."""
    state = newest_state(addresses(trained[1]), TOKEN)
    assert state is not None
    with tiny_trainer(ALONE, tiny_run(), tmp_path) as trainer:
        place = MemoryLocation(state, TOKEN)
        assert not trainer.checkpointer.has_newer(place), "there is no checkpoint"
        trainer.progress = replace(trainer.progress, step=steps, left_out=[[0, 8, 2]] * rollbacks)
        trainer.save()
        assert trainer.checkpointer.has_newer(place) == is_newer


def test_memory_replicas_keep_the_last_two_steps(trained: tuple[Path, Sequence[Node]]) -> None:
    assert [state.step for state in replica_index.complete_states(addresses(trained[1]), TOKEN)] == [3, 2]


def values(step: int, rows: int = 1000) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(rows, 37, generator=dice), "half": torch.randn(rows, generator=dice).bfloat16()}


def state_of(mesh: Mesh, step: int, rows: int = 1000) -> dict[str, StateTensor]:
    """The same on all ranks, so that each keeps a share of it."""
    return {
        name: StateTensor.full(tensor, ReplicaGroup((), mesh.rank, mesh.ranks)) for name, tensor in values(step, rows).items()
    }


def copy(mesh: Mesh, folders: list[Path], steps: list[int], generation: int = 0) -> list[Event]:
    copies = MemoryCopies(mesh, folders[mesh.rank * len(folders) // mesh.ranks], generation)
    told = []
    for step in steps:
        copies.take(step, state_of(mesh, step), RunMetadata(extra={"of": step}))
        copies.release()
        told += copies.settle()
    copies.close()
    return told


def loaded(state: replica_index.ReplicaState | None, rows: int = 1000) -> tuple[int, bool]:
    """Which step it is, and whether it is that step's state."""
    assert state is not None
    place = MemoryLocation(state, TOKEN, local=False)
    found = {name: torch.zeros_like(tensor) for name, tensor in values(0, rows).items()}
    step = load(place, found).run.extra["of"]
    return step, differing(found, values(step, rows)) == []


def test_memory_replicas_survive_any_single_node_loss(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as found:
        folders = [node.folder for node in found]
        told = run_ranks(copy, 3, folders, [5, 10])[0]
        assert [(type(event), event.step, event.peer) for event in told] == [(Copied, 5, True), (Copied, 10, True)]
        found[1].lose()
        state = newest_state(addresses(found), TOKEN)
        assert state is not None
        assert nodes_of(state) == {0: (0,), 1: (2,), 2: (2, 0)}
        assert loaded(state) == (10, True)
        # Those who live close the ring, and a copy of two ranks takes the place of the copy of three.
        living = {node.number: node.address for node in (found[0], found[2])}
        replica_index.set_peers(living, TOKEN)
        run_ranks(copy, 2, [folders[0], folders[2]], [11, 12], 1)
        states = replica_index.complete_states(addresses(found), TOKEN)
        assert [(state.generation, state.step) for state in states] == [(1, 12), (1, 11)], "the older generation was forgotten"
        assert nodes_of(states[0]) == {0: (0, 2), 1: (2, 0)}
        found[0].lose()
        assert loaded(newest_state(addresses(found), TOKEN)) == (12, True)
        found[2].lose()
        assert newest_state(addresses(found), TOKEN) is None


def test_two_copies_survive_the_loss_of_two_nodes_at_once(tmp_path: Path) -> None:
    """Two ranks on nodes 0 and 1; node 2, which has none, keeps copies, too."""
    with nodes(tmp_path, 3) as found:
        folders = [node.folder for node in found]
        replica_index.set_peers({node.number: node.address for node in found}, TOKEN, copies=2)
        told = run_ranks(copy, 2, folders[:2], [5, 10])[0]
        assert [(event.step, event.peer) for event in told] == [(5, True), (10, True)]
        state = newest_state(addresses(found), TOKEN)
        assert state is not None and {rank: sorted(where) for rank, where in nodes_of(state).items()} == {
            0: [0, 1, 2],
            1: [0, 1, 2],
        }
        found[0].lose()
        found[1].lose()
        assert loaded(newest_state(addresses(found), TOKEN)) == (10, True)


def test_newest_state_that_was_found_equal_is_kept_until_a_newer_one_is(tmp_path: Path) -> None:
    """After a corruption, states since the last comparison are wrong."""
    with nodes(tmp_path, 2) as found:

        def complete() -> list[int]:
            return [state.step for state in replica_index.complete_states(addresses(found), TOKEN)]

        copies = MemoryCopies(ALONE, found[0].folder, slots=SLOTS)
        seen = []
        for step, equal in ((1, None), (2, None), (3, 2), (4, 2), (5, 2), (6, 2), (7, 6), (8, 6), (9, 6)):
            copies.take(step, state_of(ALONE, step), RunMetadata(extra={"of": step}), equal)
            copies.release()
            copies.settle()
            seen.append(complete())
        copies.close()
        assert seen == [[1], [2, 1], [3, 2, 1], [4, 3, 2], [5, 4, 2], [6, 5, 2], [7, 6, 5], [8, 7, 6], [9, 8, 6]]
        replica_index.discard(addresses(found), TOKEN, after=6)
        assert complete() == [6]
        assert loaded(newest_state(addresses(found), TOKEN)) == (6, True)


def test_losing_the_only_replica_falls_back_to_an_older_step(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        folders = [node.folder for node in found]
        run_ranks(copy, 2, folders, [5])
        for node in found:  # from here on each is alone
            replica_index.set_peers({node.number: node.address}, TOKEN)
        told = run_ranks(copy, 2, folders, [5, 10])[0]
        assert [one.peer for one in told] == [False, False]
        states = replica_index.complete_states(addresses(found), TOKEN)
        assert [(state.step, nodes_of(state)) for state in states] == [(10, {0: (0,), 1: (1,)}), (5, {0: (0, 1), 1: (1, 0)})]
        found[1].lose()
        assert loaded(newest_state(addresses(found), TOKEN)) == (5, True)


def die_in_a_copy(mesh: Mesh, folders: list[Path]) -> None:
    copies = MemoryCopies(mesh, folders[mesh.rank])
    copies.take(5, state_of(mesh, 5), RunMetadata(extra={"of": 5}))
    copies.release()
    copies.settle()
    copies.take(10, state_of(mesh, 10), RunMetadata(extra={"of": 10}))
    if mesh.rank == 1:  # in the middle of it: its slot has the new values, and nobody was told
        slot = copies._slots["b"]
        assert slot._memory is not None
        slot._memory[: len(slot._memory) // 2] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_a_rank_killed_during_a_copy_leaves_the_older_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank's message to its replica server comes too late, as if the copy had taken so long.
    seal = MemoryCopies._seal
    monkeypatch.setattr(MemoryCopies, "_seal", lambda self, copy, *rest: _late(copy) or seal(self, copy, *rest))
    with nodes(tmp_path, 2) as found:
        with pytest.raises(RuntimeError, match="rank 1 ended without a result"):
            run_ranks(die_in_a_copy, 2, [node.folder for node in found])
        state = newest_state(addresses(found), TOKEN)
        assert loaded(state) == (5, True)


def _late(copy: shm_slots.RankCopy) -> None:
    if (copy.rank, copy.step) == (1, 10):
        time.sleep(30)


def copy_for_ever(folder: Path, generation: int) -> None:
    copies = MemoryCopies(ALONE, folder, generation)
    for step in itertools.count(1):
        copies.take(step, values(step, 20_000), RunMetadata(extra={"of": step}))
        copies.release()


def test_a_worker_killed_at_any_time_leaves_only_complete_replicas(tmp_path: Path) -> None:
    dice, found = random.Random(3), []
    with nodes(tmp_path, 2) as (one, other):
        for generation in range(200):
            if generation >= 12 and len(set(found)) > 1:
                break
            pid = fork(copy_for_ever, one.folder, generation)
            time.sleep(dice.uniform(0.05, 0.3))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for state in replica_index.complete_states([one.address, other.address], TOKEN):
                assert loaded(state, 20_000) == (state.step, True)
                found.append((state.generation, state.step))
    assert len(set(found)) > 1


def test_a_flipped_byte_in_a_replica_is_detected(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as (node,):
        told = copy(ALONE, [node.folder], [5])
        assert [(type(event), event.peer) for event in told] == [(Copied, False)]  # type: ignore[attr-defined]
        image = shm_slots.SlotDir(node.folder).slot(0, 0, "a")
        contents = bytearray(image.read_bytes())
        contents[len(contents) // 2] ^= 4
        image.write_bytes(contents)
        state = newest_state([node.address], TOKEN)
        assert state is not None
        with pytest.raises(directory.DamagedCheckpoint, match=r"step-00000005 .*state-00000-of-00001.* not have the contents"):
            loaded(state)


def test_connections_without_the_token_are_refused_and_logged(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as (node,):
        with pytest.raises(Refused, match="refused this one's token"):
            request(node.address, "another secret", {"op": "list"})
        with socket.create_connection(node.address) as stranger:
            stranger.recv(32)
            stranger.sendall(b"GET / HTTP/1.1".ljust(64))
            assert stranger.recv(64) == bytes(32) and stranger.recv(1) == b""
        assert newest_state([node.address], "another secret") is None
        deadline = time.monotonic() + 60  # a stranger is told first, and written down then
        while (refused := node.log.read_text().count("refused 127.0.0.1")) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert refused == 3
        assert request(node.address, TOKEN, {"op": "list"})[0]["copies"] == []
        with pytest.raises(OSError, match="no operation 'eval'"):
            request(node.address, TOKEN, {"op": "eval"})
        assert request(node.address, TOKEN, {"op": "list"})[0]["node"] == 0


class Middle:
    """A socket on whose way a bit of the given byte is flipped."""

    def __init__(self, sock: socket.socket, place: int):
        self.recv_into, self._sock, self._place = sock.recv_into, sock, place

    def sendall(self, data: bytes) -> None:
        changed = bytearray(data)
        if 0 <= self._place < len(changed):
            changed[self._place] ^= 16
        self._place -= len(changed)
        self._sock.sendall(changed)


@pytest.mark.parametrize("place", [2, 50, 90, -5, -100_000])
def test_a_copy_that_was_changed_on_the_way_is_refused_at_once_and_logged(tmp_path: Path, place: int) -> None:
    with nodes(tmp_path, 1) as (node,):
        copy(ALONE, [node.folder], [5])
        image = shm_slots.SlotDir(node.folder).slot(0, 0, "a")
        described = request(node.address, TOKEN, {"op": "list"})[0]["copies"][0] | {"rank": 1, "step": 6}
        size = image.stat().st_size
        length = 36 + 32 + len(json.dumps({"message": {"op": "put", "copy": described}, "bytes": size})) + 32 + size
        sock, key = frames.connect(node.address, TOKEN, frames.REPLICAS)
        with sock, image.open("rb") as file:
            sock.settimeout(30.0)
            link = Connection(Middle(sock, place % length), key, client=True)  # type: ignore[arg-type]
            with pytest.raises(ConnectionError):  # not a timeout
                link.send({"op": "put", "copy": described}, file, 0, size)
                link.receive()
        assert "it sent a message whose seal is not this connection's" in node.log.read_text()
        assert [copy["rank"] for copy in request(node.address, TOKEN, {"op": "list"})[0]["copies"]] == [0]


def test_many_silent_connections_do_not_block_the_replica_server(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as (node,):
        strangers = [socket.create_connection(node.address) for _ in range(300)]
        tasks = Path(f"/proc/{node.process.pid}/task")
        for _ in range(5):
            assert request(node.address, TOKEN, {"op": "list"}, patience=60.0)[0]["copies"] == []
        assert len(list(tasks.iterdir())) < 90, "each stranger has a thread, but only so many are kept"
        for stranger in strangers:
            stranger.close()


def test_a_server_without_the_token_receives_no_state() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        pid = os.fork()
        if pid == 0:
            link, _ = impostor.accept()
            link.sendall(secrets.token_bytes(32))
            link.recv(64)
            link.sendall(secrets.token_bytes(32))
            os._exit(0)
        with pytest.raises(Refused, match="does not know the token"):
            request(impostor.getsockname(), TOKEN, {"op": "list"})
        os.waitpid(pid, 0)


def test_too_little_memory_is_reported_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(tmp_path, 1) as (node,):
        real = os.statvfs(node.folder)
        copies = MemoryCopies(ALONE, node.folder)
        huge = torch.empty(1, device="meta").expand(real.f_blocks * real.f_frsize // 4, 1)
        monkeypatch.setattr("phalanx.checkpointing.replicas.memory_checkpoint.SharedStaging.begin", None)  # never come to
        copies.take(5, {"huge": huge}, RunMetadata())
        (told,) = copies.settle()
        assert isinstance(told, Warned) and " MiB free" in told.message
        assert f"of rank 0 need {2 * real.f_blocks * real.f_frsize / 2**20:,.0f} MiB" in told.message
        copies.take(10, {"huge": huge}, RunMetadata())
        assert copies.off is not None and copies.off in told.message and copies.settle() == []


def test_free_memory_respects_the_cgroup_limit(tmp_path: Path) -> None:
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 1\ninactive_file 30\nactive_file 20\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert shm_slots._cgroup_available(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert shm_slots._cgroup_available(tmp_path) == sys.maxsize


@pytest.mark.parametrize(("shared", "memory", "room"), [(64e9, 120e9, 48e9), (64e6, 120e9, 57.6e6), (64e9, 10e9, 4e9)])
def test_default_copies_take_most_of_the_shared_memory_but_less_than_half_of_all(
    shared: float, memory: float, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_slots, "free_memory", lambda: memory)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=shared / 4096, f_frsize=4096))
    assert shm_slots.default_room() == pytest.approx(room)


def test_a_lost_peer_is_reported_and_the_local_replica_counts(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as found:
        found[1].lose()
        warning, copied_state = copy(ALONE, [found[0].folder], [5])
        assert isinstance(copied_state, Copied) and not copied_state.peer
        assert isinstance(warning, Warned) and "rank 0: node 1: " in warning.message
        assert loaded(newest_state(addresses(found), TOKEN)) == (5, True)


def test_a_copy_in_progress_skips_later_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, seal = threading.Event(), MemoryCopies._seal
    monkeypatch.setattr(MemoryCopies, "_seal", lambda self, *rest: go_on.wait() and seal(self, *rest))
    with nodes(tmp_path, 1) as (node,):
        copies = MemoryCopies(ALONE, node.folder)
        for step in (5, 10, 15):
            copies.take(step, state_of(ALONE, step), RunMetadata(extra={"of": step}))
            copies.release()
        assert copies.ended() == []
        go_on.set()
        told = copies.settle()
        copies.take(20, state_of(ALONE, 20), RunMetadata(extra={"of": 20}))
        told += copies.settle()
        assert [(one.step, one.skipped) for one in told] == [(5, 2), (20, 0)]
        copies.close()


@pytest.mark.parametrize("pace", [None, 0.005])
def test_copies_are_skipped_until_memory_is_ready(pace: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, reserve = threading.Event(), MemoryCopies._reserve
    monkeypatch.setattr(MemoryCopies, "_reserve", lambda self: go_on.wait() and reserve(self))
    monkeypatch.setattr("phalanx.checkpointing.replicas.memory_checkpoint._LAG", 0.1)
    with nodes(tmp_path, 1) as (node,):
        copies = MemoryCopies(ALONE, node.folder)
        copies.pace = None if pace is None else CopyPace(pace)
        copies.prepare(state_of(ALONE, 0))
        for step in (1, 2):
            copies.take(step, state_of(ALONE, step), RunMetadata(extra={"of": step}))
            copies.release()
        assert copies.settle() == []
        go_on.set()
        copies._reserving.join()  # type: ignore[union-attr]
        copies.take(3, state_of(ALONE, 3), RunMetadata(extra={"of": 3}))
        assert [(type(event), event.step, event.skipped) for event in copies.settle()] == [(Copied, 3, 2)]
        assert loaded(newest_state(addresses([node]), TOKEN)) == (3, True)
        copies.close()


def test_the_first_copy_needs_the_memory_of_one_slot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, map_memory = threading.Event(), SharedStaging.map

    def late(self: SharedStaging, size: int) -> None:
        if not self._path.name.endswith("-a.safetensors"):
            go_on.wait()
        map_memory(self, size)

    monkeypatch.setattr(SharedStaging, "map", late)
    with nodes(tmp_path, 1) as (node,):
        copies = MemoryCopies(ALONE, node.folder)
        copies.pace = CopyPace(1e9)
        copies.prepare(state_of(ALONE, 0))
        copies._reserved["a"].wait(lambda: False)
        for step in (1, 2):
            copies.take(step, state_of(ALONE, step), RunMetadata(extra={"of": step}))
            copies.settle()
        assert loaded(newest_state(addresses([node]), TOKEN)) == (1, True), "of the second step, there is no copy yet"
        go_on.set()
        copies._reserving.join()  # type: ignore[union-attr]
        copies.take(3, state_of(ALONE, 3), RunMetadata(extra={"of": 3}))
        assert [(type(event), event.step, event.skipped) for event in copies.settle()] == [(Copied, 3, 1)]
        assert loaded(newest_state(addresses([node]), TOKEN)) == (3, True)
        copies.close()


def test_shared_memory_pages_are_mapped_in_advance(tmp_path: Path) -> None:
    size, path = 2**25, tmp_path / "slot"
    path.write_bytes(bytes(size + 100))
    slot = SharedStaging(torch.device("cpu"), path, bytes(100))
    slot.map(size)
    (mapping,) = [lines for lines in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1] if str(path) in lines]
    mapped = int(mapping.split("Rss:")[1].split()[0]) * 1024
    slot.close()
    assert mapped >= size


def test_a_restarted_replica_server_serves_existing_replicas(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as (node,):
        copies = MemoryCopies(ALONE, node.folder)
        copies.take(5, state_of(ALONE, 5), RunMetadata(extra={"of": 5}))
        copies.settle()
        node.process.kill()
        node.process.wait()
        copies.take(10, state_of(ALONE, 10), RunMetadata(extra={"of": 10}))
        assert "refused" in copies.settle()[0].message
        again = ReplicaServer(node.folder, 0, TOKEN)
        serving = threading.Thread(target=again.serve)
        serving.start()
        assert loaded(newest_state([again.address], TOKEN)) == (5, True)
        copies.take(15, state_of(ALONE, 15), RunMetadata(extra={"of": 15}))
        assert [type(event) for event in copies.settle()] == [Copied]
        assert loaded(newest_state([again.address], TOKEN)) == (15, True)
        copies.close()
        again.close()
        serving.join()


def test_a_lost_replica_server_fails_copies_only(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as (node,):
        copies = MemoryCopies(ALONE, node.folder)
        copies.take(5, state_of(ALONE, 5), RunMetadata(extra={"of": 5}))
        assert [type(event) for event in copies.settle()] == [Copied]
        node.lose()
        copies.take(10, state_of(ALONE, 10), RunMetadata(extra={"of": 10}))
        (told,) = copies.settle()
        assert isinstance(told, Warned) and "no replica server" in told.message
        copies.close()


def test_replica_memory_is_freed_with_the_parent_and_stale_memory_at_the_next_start(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as (one, other):
        copy(ALONE, [one.folder], [5])
        assert one.folder.stat().st_mode & 0o077 == 0
        one.end()
        assert not one.folder.exists()
        other.process.kill()
        other.process.wait()
        assert other.folder.exists()
        folder, lock = shm_slots.claim(other.folder.parent, "next")
        assert [path.name for path in other.folder.parent.iterdir()] == ["next"]
        with pytest.raises(OSError, match="in use"):
            shm_slots.claim(folder.parent, "next")
        os.close(lock)


def test_replica_server_and_index_do_not_import_torch() -> None:
    code = "import sys, phalanx.checkpointing.replicas.replica_server, phalanx.checkpointing.replicas.replica_index; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
