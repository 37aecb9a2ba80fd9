"""What can be wrong with text, as docs/data.md describes it: each a clear error, or records skipped and counted by reason."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import tokenize_in_process
from small_tokenizers import CHATML, save_bpe

from phalanx.data import chat, ingest, preferences, record_readers
from phalanx.data.ingest import tokenize_into
from phalanx.data.token_files import TokenFiles, TokenMeta
from phalanx.data.tokenizer import open_tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data

GOOD = b'{"text": "good"}\n'


@pytest.fixture(autouse=True)
def _workplace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ingest, "tokenize_pieces", tokenize_in_process)
    monkeypatch.chdir(tmp_path)


def make(*paths: str, name: str = "byte", **keys: Any) -> TokenMeta:
    data = Data(paths=paths, tokenizer=name, processes=1, **keys)
    return tokenize_into(Path("out"), data, data, open_tokenizer(name, data.end_token))


def texts() -> list[str]:
    files = TokenFiles(Path("out"))
    bounds = files.bounds(0, files.documents)
    return [
        bytes(files.read(int(bounds[i]), int(bounds[i + 1]) - 1).astype("u1")).decode(errors="replace")
        for i in range(files.documents)
    ]


SKIPPED: dict[str, tuple[bytes, dict[str, int]]] = {
    "broken JSON": (b'{"text": "a"\n{text: 1}\nnot json\n', {"broken JSON": 3}),
    "cut off in the middle": (b'{"text": "no newline and no en', {"broken JSON": 1}),
    "not an object": (b'["text"]\n"text"\n42\nnull\ntrue\n', {"not an object": 5}),
    "field missing": (b'{"body": "a"}\n{}\n{"text": null}\n', {"field missing": 3}),
    "field not text": (b'{"text": 3}\n{"text": ["a"]}\n{"text": {"a": 1}}\n', {"field is not text": 3}),
    "empty text": (b'{"text": ""}\n{"text": ""}\n', {"empty": 2}),
    "another encoding": ('{"text": "na\u00efve"}\n'.encode("latin-1"), {"not UTF-8": 1}),
    "half a character": (b'{"text": "\\ud83d"}\n', {"not UTF-8": 1}),
    "too long": (b'{"text": "' + b"x" * 2000 + b'"}\n', {"too long": 1}),
    "zero bytes": (b'{"text": "a\x00b"}\n\x00\x00\x00\n', {"broken JSON": 2}),
    "nested too deeply": (b"[" * 900 + b"\n", {"broken JSON": 1}),
    "a number too long": (b'{"text": ' + b"1" * 900 + b"}\n", {"field is not text": 1}),
    "blank lines": (b"\n  \n\r\n\t\n", {}),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_a_bad_record_is_skipped_and_counted(name: str) -> None:
    content, skipped = SKIPPED[name]
    Path("a.jsonl").write_bytes(GOOD + content.rstrip(b"\n") + b"\n" + GOOD)
    meta = make("a.jsonl", max_record_bytes=1000)
    assert texts() == ["good", "good"]
    assert meta.skipped == skipped
    assert TokenMeta.read(Path("out")).skipped == skipped


KEPT: dict[str, tuple[bytes, list[str]]] = {
    "a mark of byte order": (b"\xef\xbb\xbf" + GOOD, ["good"]),
    "lines ended as on Windows": (b'{"text": "a\\r\\n"}\r\n{"text": "b"}\r\n', ["a\r\n", "b"]),
    "the same key twice": (b'{"text": "first", "text": "last"}\n', ["last"]),
    "an escaped zero": (b'{"text": "a\\u0000b"}\n', ["a\0b"]),
    "no newline at the end": (GOOD.rstrip(), ["good"]),
    "a pair of surrogates": (b'{"text": "\\ud83d\\ude00"}\n', ["\U0001f600"]),
    "white space alone": (b'{"text": "  "}\n', ["  "]),
}


@pytest.mark.parametrize("name", KEPT)
def test_unusual_but_valid_records_are_kept(name: str) -> None:
    content, expected = KEPT[name]
    Path("a.jsonl").write_bytes(content)
    assert make("a.jsonl").skipped == {}
    assert texts() == expected


def test_every_reason_for_a_bad_record_is_documented() -> None:
    reasons = {
        record_readers.TOO_LONG,
        record_readers.NOT_UTF8,
        record_readers.BROKEN,
        record_readers.NOT_OBJECT,
        record_readers.MISSING,
        record_readers.NOT_TEXT,
    }
    reasons |= {preferences.SAME, preferences.TOO_LONG}
    reasons |= {record_readers.EMPTY, chat.MESSAGES, chat.NO_ANSWER, chat.REFUSED, chat.UNCLEAR}
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    table = text.split("| reason | when |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", table, re.M)) == reasons


def parquet(column: list[Any], name: str = "text") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: column, "n": [1] * len(column)}), "a.parquet")


def cut(path: str, content: bytes) -> None:
    Path(path).write_bytes(content[: len(content) * 2 // 3])


def packed_lines() -> bytes:
    return b"".join(b'{"text": "%d"}\n' % (i * i * 7919) for i in range(5000))


def cut_zstd() -> None:
    import zstandard

    cut("a.jsonl.zst", zstandard.compress(packed_lines()))


def cut_parquet() -> None:
    parquet([f"text {i * i}" for i in range(500)])
    cut("a.parquet", Path("a.parquet").read_bytes())


def damage_parquet() -> None:
    parquet([f"text {i * 7919 * i}" for i in range(5000)])
    content = bytearray(Path("a.parquet").read_bytes())
    content[100:3000] = b"\xff" * 2900
    Path("a.parquet").write_bytes(content)


def write(path: str, content: bytes) -> Callable[[], None]:
    def wanted() -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content)

    return wanted


def saved_dataset() -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"body": ["a", "b"]})}).save_to_disk("saved")


REFUSED: dict[str, tuple[Callable[[], None], tuple[str, ...], dict[str, Any], str]] = {
    "nothing matches": (lambda: None, ("*.jsonl",), {}, r'data\.paths: "\*\.jsonl" matches no file or folder \(tried /'),
    "no such file": (lambda: None, ("gone.jsonl",), {}, r'"gone\.jsonl" matches no file'),
    "folder without data": (write("d/README.md", b"hi"), ("d",), {"source": "jsonl"}, r'"d" holds no files named \.jsonl'),
    "empty folder": (lambda: Path("d").mkdir(), ("d",), {"source": "text"}, r'"d" holds no files'),
    "empty file": (write("a.jsonl", b""), ("a.jsonl",), {}, r"a\.jsonl is empty"),
    "empty files": (lambda: [write(f"{n}.jsonl", b"")() for n in "ab"] and None, ("*.jsonl",), {}, r"all 2 files are empty"),
    "only blank lines": (write("a.jsonl", b"\n\n"), ("a.jsonl",), {}, r"there is no record in a\.jsonl"),
    "no path": (lambda: None, (" ",), {"source": "text"}, r"holds an empty path"),
    "wrong field": (write("a.jsonl", b'{"body": "x", "id": 1}\n'), ("a.jsonl",), {}, r'no record of a\.jsonl can be used: 1 × field missing, first .*a\.jsonl, line 1 \(no "text"; its fields are: body, id\); set data\.field \(--field\) to the one that holds the text, or name other files'),
    "field inside is not text": (write("a.jsonl", b'{"a": {"b": 3}}\n'), ("a.jsonl",), {"field": "a.b"}, r'field is not text.*"a\.b" is a int'),
    "all empty": (write("a.jsonl", b'{"text": ""}\n'), ("a.jsonl",), {}, r"no record .* can be used: 1 × empty"),
    "one JSON value over many lines": (write("a.json", json.dumps([{"text": "a"}], indent=1).encode()), ("a.json",), {}, r"no record of a\.json can be used: 5 × broken JSON, .*every line must be a JSON object"),
    "not text at all": (write("a.jsonl", os.urandom(1 << 16)), ("a.jsonl",), {}, r"records of a\.jsonl cannot be used"),
    "too many bad ones": (write("a.jsonl", GOOD + b"{\n" * 101), ("a.jsonl",), {}, r"101 or more records .* data\.max_bad_records .*= 100: 101 × broken JSON, first .*a\.jsonl, line 2 .*raise the limit"),
    "no bad one allowed": (write("a.jsonl", GOOD + b"{\n"), ("a.jsonl",), {"max_bad_records": 0}, r"1 or more records .*= 0"),
    "gzip cut off": (lambda: cut("a.jsonl.gz", gzip.compress(packed_lines())), ("a.jsonl.gz",), {}, r"a\.jsonl\.gz is cut off: its compressed data has no end"),
    "no gzip": (write("a.jsonl.gz", GOOD * 9), ("a.jsonl.gz",), {}, r"a\.jsonl\.gz is damaged"),
    "text gzip cut off": (lambda: cut("a.txt.gz", gzip.compress(packed_lines())), ("a.txt.gz",), {}, r"a\.txt\.gz is cut off"),
    "zstd cut off": (cut_zstd, ("a.jsonl.zst",), {}, r"a\.jsonl\.zst is cut off: its compressed data has no end"),
    "no zstd": (write("a.jsonl.zst", GOOD * 9), ("a.jsonl.zst",), {}, r"a\.jsonl\.zst is damaged"),
    "missing column": (lambda: parquet(["a"], "body"), ("a.parquet",), {}, r'a\.parquet has no column "text"; its columns are body, n\.'),
    "column not text": (lambda: parquet(["a"]), ("a.parquet",), {"field": "n"}, r'column "n" is int64, not text'),
    "column nulls": (lambda: parquet([None, "", None]), ("a.parquet",), {}, r"no record .*2 × field missing.*1 × empty"),
    "parquet cut off": (cut_parquet, ("a.parquet",), {}, r"a\.parquet is not a Parquet file, or is cut off or damaged"),
    "parquet damaged": (damage_parquet, ("a.parquet",), {}, r"a\.parquet is not a Parquet file, or is cut off or damaged"),
    "no parquet": (write("a.parquet", GOOD), ("a.parquet",), {}, r"a\.parquet is not a Parquet file"),
    "parquet packed again": (write("a.parquet.gz", gzip.compress(GOOD)), ("a.parquet.gz",), {}, r"Parquet compresses its columns itself"),
    "several kinds": (lambda: [write(n, GOOD)() for n in ("a.jsonl", "b.txt")] and None, ("a.jsonl", "b.txt"), {}, r"several kinds \(jsonl, text\)"),
    "unknown storage": (lambda: None, ("nowhere://a.jsonl",), {}, r"nowhere://a\.jsonl: no such kind of storage"),
    "URL of nothing": (lambda: None, ("file:///nowhere/a.jsonl",), {}, r"file:///nowhere/a\.jsonl is not there"),
    "template missing": (write("a.jsonl", b'{"prompt": "a", "response": "b"}\n'), ("a.jsonl",), {"source": "chat"}, r"has no chat template"),
    "chat without answers": (write("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n'), ("a.jsonl",), {"source": "chat", "template": "plain"}, r"no record .*1 × no answer"),
    "no such split": (saved_dataset, ("saved",), {"split": "test"}, r'has no split "test"; its splits are train'),
    "no such column of a dataset": (saved_dataset, ("saved",), {}, r'saved has no column "text"; its columns are body'),
    "token files": (lambda: None, ("a",), {"source": "tokens"}, r"holds token files already"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_sources_are_refused_by_name(name: str) -> None:
    prepare, paths, keys, said = REFUSED[name]
    prepare()
    with pytest.raises(RunError, match=said):
        make(*paths, **keys)
    assert not Path("out").exists(), "nothing is left of it"


def test_chat_template_without_an_answer_is_refused() -> None:
    Path("a.jsonl").write_bytes(b'{"prompt": "a", "response": "b"}\n')
    Path("t.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(RunError, match=r"t\.jinja does not render what the assistant says"):
        make("a.jsonl", source="chat", template="t.jinja")
    Path("t.jinja").write_text(CHATML.replace("message.content", "message.nothing.at_all"))
    with pytest.raises(
        RunError, match=r"1 × refused by the template, first .*line 1 \('dict object' has no attribute 'nothing'"
    ):
        make("a.jsonl", source="chat", template="t.jinja")


def test_text_files_that_are_not_utf8_are_skipped(tmp_path: Path) -> None:
    """A byte tokenizer takes any bytes; one with a vocabulary of text needs text."""
    Path("d").mkdir()
    Path("d/a.txt").write_bytes(b"\xef\xbb\xbfgood")
    Path("d/b.txt").write_bytes("naïve".encode("latin-1"))
    Path("d/c.txt").write_bytes("naïve".encode("utf-16"))
    Path("d/d.txt.gz").write_bytes(gzip.compress(b"x" * 5000))
    name = str(save_bpe(tmp_path / "words"))
    meta = make("d", name=name, source="text", max_record_bytes=1000)
    assert meta.documents == 1 and meta.skipped == {"not UTF-8": 2, "too long": 1}
    files = TokenFiles(Path("out"))
    assert open_tokenizer(name).decode(files.read(0, files.tokens)) == "good"


def test_parquet_values_that_are_not_utf8_are_skipped() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.array([b"good", b"na\xefve", b"fine"], pa.binary())
    pq.write_table(pa.table({"text": raw}), "a.parquet")
    assert make("a.parquet").skipped == {"not UTF-8": 1}
    assert texts() == ["good", "fine"]
    pq.write_table(pa.table({"text": raw.view(pa.string())}), "b.parquet")
    data = Data(paths=("b.parquet",))
    assert tokenize_into(Path("two"), data, data, open_tokenizer("byte")).skipped == {"not UTF-8": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named() -> None:
    Path("a.jsonl").write_bytes(GOOD)
    Path("a.jsonl").chmod(0)
    with pytest.raises(RunError, match=r"a\.jsonl cannot be read"):
        make("a.jsonl")
