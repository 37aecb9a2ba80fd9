from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from phalanx.data import files
from phalanx.data.files import decompressed
from phalanx.data.record_readers import json_lines, lines, next_line, parquet_rows, row_groups, text_in


def test_line_reader_equals_split() -> None:
    dice = random.Random(0)
    for _ in range(200):
        content = b"\n".join(b"x" * dice.choice([0, 1, 5, 30]) for _ in range(dice.randint(0, 20)))
        whole = content.split(b"\n")
        if whole[-1] == b"":
            whole.pop()
        found = list(lines([content[:7], content[7:]], limit=10))
        assert [line for _, line in found] == [line if len(line) <= 10 else None for line in whole]
        for (offset, _), line in zip(found, whole, strict=True):
            assert content[offset : offset + len(line)] == line


def test_every_line_belongs_to_exactly_one_byte_range(tmp_path: Path) -> None:
    dice = random.Random(1)
    path = tmp_path / "a.jsonl"
    for _ in range(60):
        records = [{"n": n, "pad": "x" * dice.choice([0, 3, 200])} for n in range(dice.randint(1, 30))]
        path.write_text("\n".join(map(json.dumps, records)) + dice.choice(["", "\n", "\n\n"]))
        size, cut = path.stat().st_size, dice.randint(1, 120)
        edges = [*range(0, size, cut), size]
        found = []
        for start, stop in itertools.pairwise(edges):
            for place, record in json_lines(str(path), 1 << 20, start, stop):
                assert isinstance(record, dict)
                found.append(record)
                assert place().endswith(f", line {record['n'] + 1}")
        assert found == records


def test_byte_range_inside_a_long_line_reads_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 5000 + b"\nlast\n")
    with path.open("rb") as file:
        assert next_line(file, 100, 200) == 200
        assert file.tell() <= 200
        assert next_line(file, 4000, 5003) == 5001
        assert next_line(file, 5001, 5006) == 5001
        assert next_line(file, 5002, 5006) == 5006


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_huge_line_is_skipped_in_little_memory(packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"huge.jsonl{packing}"
    size = 1 << 30
    if packing == "":
        with path.open("wb") as file:
            file.write(b'{"text": "a"}\n')
            file.truncate(size)  # zeros that take no room on disk
            file.seek(0, 2)
            file.write(b'\n{"text": "b"}\n')
    else:
        size = 1 << 27
        content = b'{"text": "a"}\n' + b"x" * size + b'\n{"text": "b"}\n'
        if packing == ".gz":
            path.write_bytes(gzip.compress(content, 1))
        else:
            import zstandard

            path.write_bytes(zstandard.compress(content))
        del content
    tracemalloc.start()
    try:
        found = [record for _, record in json_lines(str(path), 1 << 20)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [record if isinstance(record, dict) else record.reason for record in found] == [
        {"text": "a"},
        "too long",
        {"text": "b"},
    ]
    assert peak < 48 << 20, f"{peak >> 20} MiB"


def test_field_name_with_dots_prefers_the_whole_name() -> None:
    assert text_in({"a.b": "whole", "a": {"b": "inside"}}, "a.b", 100) == "whole"
    assert text_in({"a": {"b": "inside"}}, "a.b", 100) == "inside"


def test_compressed_suffixes_are_known_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress(b"one") + gzip.compress(b"two"))
    assert b"".join(decompressed(str(tmp_path / "A.TXT.GZ"))) == b"onetwo"


class Rangeless(MemoryFileSystem):
    """A web server that sends whole files only, as fsspec sees it."""

    protocol = "http"
    store: ClassVar[dict[str, Any]] = {}

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        whole = super()._open(path, *args, **options)

        class FrontToBack(io.RawIOBase):
            def seek(self, offset: int, whence: int = 0, /) -> int:
                raise ValueError("The HTTP server doesn't appear to support range requests.")

            def read(self, size: int = -1, /) -> bytes:
                return bytes(whole.read(size))

        return FrontToBack()


def test_web_server_without_ranges_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet", row_group_size=2)
    server = Rangeless()
    server.pipe_file("/a.parquet", (tmp_path / "a.parquet").read_bytes())
    monkeypatch.setattr(files, "filesystem", lambda url: (server, url.removeprefix("http://here")))
    assert len(row_groups("http://here/a.parquet", "text")) == 2
    assert [text for _, text in parquet_rows("http://here/a.parquet", "text", 1, 2)] == ["c"]
