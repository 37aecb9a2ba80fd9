"""Files written and read in blocks: the same bytes however they are cut, and damage is found and placed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import flip

from phalanx.checkpointing import format, location
from phalanx.checkpointing.format import CheckedFile, DamagedFile, checksum_of, file_checksum, read_block_sums, write_file
from phalanx.checkpointing.location import Local

BLOCK = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: Any) -> None:
    monkeypatch.setattr(format, "BLOCK", BLOCK)


def cut(data: bytes, sizes: Iterator[int]) -> Iterator[memoryview]:
    begin = 0
    while begin < len(data):
        size = next(sizes)
        yield memoryview(data)[begin : begin + size]
        begin += size


def endless(dice: random.Random, *choices: int) -> Iterator[int]:
    while True:
        yield dice.choice(choices)


LENGTHS = (0, 1, 999, 1000, 1001, 2000, 3500, 10_000)


@pytest.mark.parametrize("listed", [False, True], ids=["made on the way", "there"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sizes", [(1,), (0, 1, 999), (999, 1000, 1001), (1000,), (10_000,), (0, 7, 350, 2500)], ids=str)
def test_write_file_gives_the_same_file_for_any_chunking(
    length: int, sizes: tuple[int, ...], listed: bool, tmp_path: Path
) -> None:
    dice = random.Random(length)
    data = dice.randbytes(length)
    file = Local(tmp_path / "file")
    chunks = cut(data, endless(dice, *sizes))
    sums = write_file(file, list(chunks) if listed else chunks)
    assert (tmp_path / "file").read_bytes() == data
    assert sums == [zlib.crc32(data[begin : begin + BLOCK]) for begin in range(0, max(1, length), BLOCK)]
    assert read_block_sums(file) == sums and checksum_of(data) == file_checksum(sums)
    assert file_checksum(sums) == hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in sums)).hexdigest()


def test_write_file_allows_chunks_that_reuse_memory(tmp_path: Path) -> None:
    buffer, data = bytearray(700), random.Random(4).randbytes(7_000)

    def reused() -> Iterator[memoryview]:
        for begin in range(0, len(data), 700):
            buffer[:] = data[begin : begin + 700]
            yield memoryview(buffer)

    assert write_file(Local(tmp_path / "file"), reused()) == [
        zlib.crc32(data[at : at + BLOCK]) for at in range(0, 7_000, BLOCK)
    ]
    assert (tmp_path / "file").read_bytes() == data


def test_chunks_are_written_whole_whatever_header_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is cut where a block ends costs a second, small write, and a disk that is written directly waits for each."""
    written: list[int] = []
    write = location._DirectFile.write

    def watched(file: Any, data: memoryview | bytes) -> None:
        written.append(len(data))
        write(file, data)

    monkeypatch.setattr(location._DirectFile, "write", watched)
    chunks = [b"h" * 96, *[b"v" * BLOCK] * 5]
    for given in (chunks, iter(chunks)):
        written.clear()
        write_file(Local(tmp_path / "file"), given)
        assert written == [96, *[BLOCK] * 5]


def test_checked_file_reads_any_byte_range(tmp_path: Path) -> None:
    dice = random.Random(1)
    data = dice.randbytes(5_432)
    file = Local(tmp_path / "file")
    checked = CheckedFile(file, len(data), write_file(file, [data]))
    for _ in range(300):
        begin = dice.randrange(len(data) + 1)
        into = bytearray(dice.choice([0, 1, 500, 1000, 3000]))
        into = into[: len(data) - begin]
        checked.read(begin, memoryview(into), prefetch=dice.random() < 0.5)
        assert into == data[begin : begin + len(into)]
    with pytest.raises(DamagedFile, match="has 5432 bytes, of which 5431 to 5433 were requested"):
        checked.read(5431, memoryview(bytearray(2)))
    checked.close()


@pytest.mark.parametrize("block", range(4))
def test_checked_file_detects_damage_in_the_damaged_block_only(block: int, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(3_500)
    file = Local(tmp_path / "file")
    sums = write_file(file, [data])
    flip(tmp_path / "file", block * BLOCK + 321, 5)
    checked = CheckedFile(file, len(data), sums)
    for number in range(4):
        into = bytearray(100)
        if number == block:
            last = min(len(data), (block + 1) * BLOCK)
            with pytest.raises(
                DamagedFile, match=rf"file file does not have the contents .* \(bytes {block * BLOCK} to {last}\)"
            ):
                checked.read(number * BLOCK, memoryview(into))
        else:
            checked.read(number * BLOCK, memoryview(into))
            assert into == data[number * BLOCK : number * BLOCK + 100]
    checked.close()


def test_checked_file_detects_a_truncated_file(tmp_path: Path) -> None:
    data = bytes(2_500)
    file = Local(tmp_path / "file")
    sums = write_file(file, [data])
    (tmp_path / "file").write_bytes(data[:2_400])
    checked = CheckedFile(file, len(data), sums)
    with pytest.raises(DamagedFile, match="bytes 2000 to 2500"):
        checked.read(2_450, memoryview(bytearray(10)))
    checked.close()
    with pytest.raises(DamagedFile, match="checksums of 3 blocks for 3500 bytes"):
        CheckedFile(file, 3_500, sums)


class Counted(Local):
    """How often, and which, blocks are read."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.begins: list[int] = []

    def read_block(self, begin: int, length: int) -> memoryview:
        self.begins.append(begin)
        return super().read_block(begin, length)


def test_checked_file_reads_needed_blocks_once(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(10_000)
    sums = write_file(Local(tmp_path / "file"), [data])
    file = Counted(tmp_path / "file")
    checked = CheckedFile(file, len(data), sums)
    for begin in range(3_000, 5_000, 100):  # row by row through two blocks
        checked.read(begin, memoryview(bytearray(100)), prefetch=False)
    assert file.begins == [3_000, 4_000]
    checked.read(7_100, memoryview(bytearray(100)))
    checked.close()
    assert sorted(file.begins[2:]) in ([7_000], [7_000, 8_000])  # the next one may be on its way already


def test_a_full_disk_ends_a_write_and_closes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = location._DirectFile.write, [2_000]

    def limited(file: location._DirectFile, data: memoryview | bytes) -> None:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(location._DirectFile, "write", limited)
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space left"):
        write_file(Local(path), [bytes(700)] * 5)
    assert path.stat().st_size == 1400 and not is_open(path)
    with path.open():
        assert is_open(path)


def is_open(path: Path) -> bool:
    """Whether this process has the file open. Descriptors of others may come and go meanwhile."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return str(path) in links
