"""Sources of every kind to token files: the same ids as the tokenizer's library gives, however the work was divided."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import tokenize_in_process
from small_tokenizers import MARKED, save_bpe

from phalanx.data import ingest, pieces
from phalanx.data.ingest import Progress, cached_token_files, tokenize_into
from phalanx.data.token_files import TokenFiles, TokenMeta
from phalanx.data.tokenizer import open_tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data, MixedSource

TEXTS = [f"The quick brown fox {i} jumps – 語 {'and jumps ' * (i % 17)}" for i in range(300)]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "tokenize_pieces", tokenize_in_process)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 3000)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_bpe(tmp_path_factory.mktemp("bpe")))


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def make(folder: Path, name: str = "byte", **keys: Any) -> TokenMeta:
    data = Data(**({"tokenizer": name, "processes": 1} | keys))
    return tokenize_into(folder, data, data, open_tokenizer(name, data.end_token))


def documents(folder: Path) -> list[list[int]]:
    """The ids of each document, its end token taken off."""
    files = TokenFiles(folder)
    bounds = files.bounds(0, files.documents)
    stream = files.read(0, files.tokens)
    assert (stream[bounds[1:] - 1] == files.meta.end).all()
    return [stream[a : b - 1].tolist() for a, b in itertools.pairwise(bounds)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def expected(name: str, texts: list[str]) -> list[list[int]]:
    """By the library itself, one text after the other."""
    if name == "byte":
        return [list(text.encode()) for text in texts]
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(f"{name}/tokenizer.json")
    return [library.encode(text).ids for text in texts]


def save_kind(kind: str, folder: Path) -> dict[str, Any]:
    """TEXTS as a source of this kind: what the run file says about it."""
    match kind:
        case "jsonl":
            return {"paths": (str(write_jsonl(folder / "a.jsonl", TEXTS)),)}
        case "jsonl.gz":
            (folder / "a.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder / "a", TEXTS).read_bytes()))
            return {"paths": (str(folder / "a.jsonl.gz"),)}
        case "jsonl.zst":
            import zstandard

            content = write_jsonl(folder / "a", TEXTS).read_bytes()
            halves = [zstandard.compress(part) for part in (content[:5000], content[5000:])]
            (folder / "a.jsonl.zst").write_bytes(b"".join(halves))  # several frames, as parallel packers write
            return {"paths": (str(folder / "a.jsonl.zst"),)}
        case "nested":
            records = ({"meta": {"body": text}} for text in TEXTS)
            (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))  # no newline at the end
            return {"paths": (str(folder / "*.jsonl"),), "field": "meta.body"}
        case "parquet" | "parquet nested":
            import pyarrow as pa
            import pyarrow.parquet as pq

            own = {"body": TEXTS} if kind == "parquet" else {"meta": [{"body": text, "n": 1} for text in TEXTS]}
            pq.write_table(pa.table(own | {"n": list(range(len(TEXTS)))}), folder / "a.parquet", row_group_size=37)
            return {"paths": (str(folder),), "field": "body" if kind == "parquet" else "meta.body"}
        case "text":
            for number, text in enumerate(TEXTS[:40]):
                (folder / f"{number:03}.txt").write_text(text)
            (folder / "040.txt.gz").write_bytes(gzip.compress(TEXTS[40].encode()))
            return {"paths": (str(folder),), "source": "text"}
        case "hf":
            import datasets

            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(folder / "saved")
            return {"paths": (str(folder / "saved"),)}
        case "url":
            write_jsonl(folder / "a.jsonl", TEXTS[:100])
            write_jsonl(folder / "b.jsonl", TEXTS[100:])
            return {"paths": (f"file://{folder}/*.jsonl",)}
        case "memory":
            return {"source": "memory", "documents": tuple(TEXTS)}
    raise AssertionError(kind)


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "nested", "parquet", "parquet nested", "text", "hf", "url", "memory"]


@pytest.mark.usefixtures("here", "small_pieces")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", ["byte", "bpe"])
def test_every_kind_of_source_gives_the_ids_of_the_tokenizers_library(kind: str, words: str, bpe: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    name = bpe if words == "bpe" else "byte"
    meta = make(tmp_path / "out", name, **save_kind(kind, tmp_path / "in"))
    texts = TEXTS[:41] if kind == "text" else TEXTS
    assert documents(tmp_path / "out") == expected(name, texts)
    assert (meta.documents, meta.skipped, meta.masked) == (len(texts), {}, False)
    assert meta.tokenizer_sha256 == open_tokenizer(name).sha256
    if kind in ("jsonl", "parquet", "text", "hf", "memory"):
        assert len(meta.parts) > 1


@pytest.mark.usefixtures("small_pieces")
def test_token_files_are_the_same_for_any_number_of_processes(bpe: str, tmp_path: Path) -> None:
    paths = (str(write_jsonl(tmp_path / "a.jsonl", TEXTS)),)
    for processes in (1, 3):
        make(tmp_path / f"out-{processes}", bpe, paths=paths, processes=processes)
    assert contents(tmp_path / "out-1") == contents(tmp_path / "out-3")
    assert documents(tmp_path / "out-1") == expected(bpe, TEXTS)


@pytest.mark.usefixtures("here", "small_pieces")
@pytest.mark.parametrize("kind", ["jsonl", "hf"])
def test_interrupted_tokenization_resumes_with_the_same_result(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    keys = save_kind(kind, tmp_path / "in")
    make(tmp_path / "straight", **keys)
    data = Data(**keys)

    class Killed(Exception):
        pass

    def kill_at(number: int) -> Callable[[Progress], None]:
        seen = []

        def progress(now: Progress) -> None:
            seen.append(now)
            if len(seen) == number:
                raise Killed

        return progress

    for _ in range(3):
        with pytest.raises(Killed):
            tokenize_into(tmp_path / "out", data, data, open_tokenizer("byte"), progress=kill_at(2))
        with pytest.raises(RunError, match=r"tokens\.json is missing"):
            TokenFiles(tmp_path / "out")
    done = sorted((tmp_path / "out").glob("*.done"))
    assert len(done) == 6, "each start went on where the one before ended"
    (tmp_path / "out" / "part-000001.tokens").write_bytes(b"cut")  # a part that is no longer what it was is made again
    (tmp_path / "out" / "part-000007.tokens.unfinished").write_bytes(b"half")
    kept: list[int] = []
    tokenize_into(tmp_path / "out", data, data, open_tokenizer("byte"), progress=lambda now: kept.append(now.kept))
    assert kept[-1] > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


@pytest.mark.usefixtures("here")
def test_token_files_of_another_source_are_not_overwritten(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:5])
    first = make(tmp_path / "out", paths=(str(path),))
    assert make(tmp_path / "out", paths=(str(path),)) == first, "nothing to do"
    with pytest.raises(RunError, match=r'field was "text" and is "id".*--force'):
        make(tmp_path / "out", paths=(str(path),), field="id")
    with pytest.raises(RunError, match=r"max_record_bytes was 67108864 and is 100"):
        make(tmp_path / "out", paths=(str(path),), max_record_bytes=100)
    write_jsonl(path, TEXTS[:6])
    with pytest.raises(RunError, match=r"1 of its files differ or have changed, first .*a\.jsonl"):
        make(tmp_path / "out", paths=(str(path),))
    data = Data(paths=(str(path),), processes=1)
    assert tokenize_into(tmp_path / "out", data, data, open_tokenizer("byte"), force=True).documents == 6
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"1")
    with pytest.raises(RunError, match=r"photos is not empty and holds other files \(me\.jpg\)"):
        make(tmp_path / "photos", paths=(str(path),))
    with pytest.raises(RunError, match=r"a\.jsonl is a file; name a folder"):
        make(path, paths=(str(path),))


@pytest.mark.usefixtures("here")
def test_retry_after_a_refused_source_needs_no_force(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:5], field="body")
    with pytest.raises(RunError, match=r'no "text"; its fields are: id, body'):
        make(tmp_path / "out", paths=(str(path),))
    assert make(tmp_path / "out", paths=(str(path),), field="body").documents == 5


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("named", [".", "../text", "link"])
def test_token_files_inside_the_text_are_refused(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start would take them for text."""
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path / "text")
    write_jsonl(Path("a.jsonl"), TEXTS)
    Path("link").symlink_to(".")
    with pytest.raises(RunError, match=r"out is inside .*, which is read as text; name a folder outside of it"):
        make(Path("out"), paths=(named,))
    with pytest.raises(RunError, match=r"data\.cache: cache is inside .*, which is read as text"):
        data = Data(paths=(named,), cache="cache")
        cached_token_files(data, data, open_tokenizer("byte"))
    assert sorted(path.name for path in Path().iterdir()) == ["a.jsonl", "link"]
    for _ in range(2):  # hidden names are never read
        assert make(Path(".out"), paths=(named,)).documents == len(TEXTS)
    assert make(Path("out"), paths=("a.jsonl",)).documents == len(TEXTS)


@pytest.mark.usefixtures("here")
def test_leftovers_of_a_killed_start_are_accepted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").touch()
    (out / "plan.json.unfinished").touch()
    assert make(out, paths=(str(write_jsonl(tmp_path / "a.jsonl", TEXTS)),)).documents == len(TEXTS)
    assert not (out / "plan.json.unfinished").exists()


@pytest.mark.usefixtures("here")
def test_tokenized_conversations_have_masks(tmp_path: Path) -> None:
    folder = save_bpe(tmp_path / "words", template=MARKED, eos="<|endoftext|>")
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    unanswered = [*turns, {"role": "user", "content": "And?"}]
    records = [{"messages": turns}, {"messages": unanswered}, {"messages": turns[:1]}, {"prompt": "What?", "response": "That."}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    meta = make(tmp_path / "out", str(folder), paths=(str(tmp_path / "chat.jsonl"),), source="chat")
    assert meta.masked and meta.documents == 3 and meta.skipped == {"no answer": 1}
    files, words = TokenFiles(tmp_path / "out"), open_tokenizer(str(folder))
    bounds = files.bounds(0, 3)
    told = [files.read(bounds[i], bounds[i + 1]) for i in range(3)]
    masks = [files.mask(bounds[i], bounds[i + 1]) for i in range(3)]
    assert told[0].tolist() == told[2].tolist()
    for ids, mask in zip(told, masks, strict=True):
        assert mask is not None and words.decode(ids[mask]) == "That."
    # The template ends every turn with a special token and a line break: no end token follows, and the line break is no part of an answer.
    assert all(words.end not in ids for ids in told)
    assert [mask[-2:].tolist() for mask in masks if mask is not None] == [[True, False], [False, False], [True, False]]
    make(tmp_path / "plain", paths=(str(tmp_path / "chat.jsonl"),), source="chat", template="plain")
    plain = TokenFiles(tmp_path / "plain")
    mask = plain.mask(0, int(plain.bounds(0, 1)[1]))
    assert mask is not None and mask[-3:].all(), "the empty line behind the answer, and the end"


@pytest.mark.usefixtures("here")
def test_token_cache_key_covers_everything_that_determines_ids(tmp_path: Path, bpe: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:5])
    data = Data(paths=(str(path),), cache=str(tmp_path / "cache"))
    words = open_tokenizer("byte")
    first = cached_token_files(data, data, words)
    assert first.parent == tmp_path / "cache" and TokenFiles(first).documents == 5
    before = contents(first)
    calls: list[Progress] = []
    assert cached_token_files(data, data, words, calls.append) == first and not calls and contents(first) == before
    mixed = MixedSource(name="part", paths=data.paths, weight=2.0, epochs=3)
    assert cached_token_files(mixed, data, words) == first, "weights and epochs change no id"
    others = [
        cached_token_files(data, replace(data, max_record_bytes=5000), words),
        cached_token_files(data, replace(data, tokenizer=bpe), open_tokenizer(bpe)),
    ]
    write_jsonl(path, TEXTS[:6])
    others.append(cached_token_files(data, data, words))
    assert len({first, *others}) == 4
    assert TokenFiles(others[-1]).documents == 6


@pytest.mark.usefixtures("here")
def test_lower_limit_of_bad_records_refuses_cached_token_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:5])
    path.write_text(path.read_text() + "{broken\n")
    data = Data(paths=(str(path),), cache=str(tmp_path / "cache"))
    cached_token_files(data, data, open_tokenizer("byte"))
    with pytest.raises(RunError, match=r"1 or more records .*data\.max_bad_records .*= 0: 1 × broken JSON"):
        cached_token_files(data, replace(data, max_bad_records=0), open_tokenizer("byte"))


@pytest.mark.usefixtures("here")
def test_concurrent_tokenization_of_one_source_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(paths=(str(write_jsonl(tmp_path / "a.jsonl", TEXTS)),), cache=str(tmp_path / "cache"))
    made, reached, go_on = [], threading.Event(), threading.Event()
    real = ingest._make

    def slowly(*work: Any) -> TokenMeta:
        made.append(work)
        reached.set()
        go_on.wait(20)
        return real(*work)

    monkeypatch.setattr(ingest, "_make", slowly)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(cached_token_files(data, data, open_tokenizer("byte")))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert reached.wait(20) and not found
    with pytest.raises(RunError, match="is being written by another process"):
        make(next((tmp_path / "cache").glob("tokens-*")), paths=data.paths)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1 and len(found) == 3 and len(set(found)) == 1


@pytest.mark.usefixtures("here")
def test_skipped_records_are_logged_with_their_positions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3])
    path.write_text(path.read_text() + "{broken\n" * 9 + json.dumps({"text": ""}) + "\n")
    with caplog.at_level(logging.WARNING, "phalanx.data"):
        meta = make(tmp_path / "out", paths=(str(path),))
    assert meta.skipped == {"broken JSON": 9, "empty": 1}
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"skipped, broken JSON: {path}, line {line}" for line in (4, 5, 6)
    ]


def test_death_of_a_tokenizer_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.spec.errors import RunFailed

    monkeypatch.setattr(ingest, "_START", "import os; os.kill(os.getpid(), 9)")
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3])
    with pytest.raises(RunFailed, match=r"killed by signal 9 .*"):
        make(tmp_path / "out", paths=(str(path),))


def test_full_disk_is_reported_by_tokenization(tmp_path: Path, mount_disk: Callable[[Path, str], Path]) -> None:
    from phalanx.spec.errors import RunFailed

    disk = mount_disk(tmp_path / "disk", "64k")
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 20)
    with pytest.raises(RunFailed, match=r"cannot be written \(No space left on device\): free space"):
        make(disk / "out", paths=(str(path),))


@pytest.mark.usefixtures("here")
def test_large_vocabularies_use_four_bytes_per_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    library = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "big.json"))
    path = write_jsonl(tmp_path / "a.jsonl", ["w69999 w1", "w65536"])
    meta = make(tmp_path / "out", str(tmp_path / "big.json"), paths=(str(path),))
    assert meta.dtype == "uint32"
    assert documents(tmp_path / "out") == [[69999, 1], [65536]]
    assert TokenFiles(tmp_path / "out").read(0, 2).dtype == np.uint32


@pytest.mark.usefixtures("here", "small_pieces")
def test_hf_dataset_is_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "train.jsonl", TEXTS)
    make(tmp_path / "out", source="hf", streaming=True, paths=(str(tmp_path / "in"),))
    assert documents(tmp_path / "out") == expected("byte", TEXTS)
    with pytest.raises(RunError, match=r'has no column "body"; its columns are id, text'):
        make(tmp_path / "wrong", source="hf", streaming=True, paths=(str(tmp_path / "in"),), field="body")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("parquet", "pyarrow", "data"), ("jsonl.zst", "zstandard", "data"), ("hf", "datasets", "datasets")],
)
def test_missing_package_is_reported_with_its_extra(
    kind: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    keys = save_kind(kind, tmp_path / "in")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
    with pytest.raises(RunError, match=rf"{package}: pip install 'phalanx\[{extra}\]'"):
        make(tmp_path / "out", **keys)
