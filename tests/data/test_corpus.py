from __future__ import annotations

import os
import random
import subprocess
import sys
import sysconfig
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from phalanx.data import corpus as source_module
from phalanx.data.corpus import END, MemoryCorpus, TextFileCorpus
from phalanx.data.dataset import open_dataset
from phalanx.data.files import find_files, stdlib_files
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.run import Data, MixedSource


def text(*paths: str | Path) -> TextFileCorpus:
    files = find_files(Data(source="text", paths=tuple(map(str, paths))), "text")
    return TextFileCorpus({file.path: file.size or 0 for file in files})


def piece(corpus: TextFileCorpus, document: int, start: int, stop: int) -> bytes:
    """Bytes of a document."""
    begin = int(corpus.bounds(document, document)[0])
    return corpus.read(begin + start, begin + stop).astype(np.uint8).tobytes()


def write(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def whole(corpus: TextFileCorpus) -> dict[str, bytes]:
    bounds = corpus.bounds(0, corpus.documents).tolist()
    assert all(corpus.read(stop - 1, stop).tolist() == [END] for stop in bounds[1:])
    return {
        name: corpus.read(start, stop - 1).astype(np.uint8).tobytes()
        for name, start, stop in zip(corpus.names, bounds[:-1], bounds[1:], strict=True)
    }


def problems_of(data: Data) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        open_dataset(data, 2, 0)
    return caught.value.problems


def test_stdlib_source_has_all_modules_and_no_installed_package() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    unwanted = {"site-packages", "dist-packages", "__pycache__"}
    expected = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not unwanted & set(path.relative_to(root).parts) and path.stat().st_size
    )
    documents = TextFileCorpus({file.path: file.size or 0 for file in stdlib_files()})
    assert list(documents.names) == expected
    assert {"os.py", "json/decoder.py"} <= set(documents.names)
    i = list(documents.names).index("json/decoder.py")
    content = (root / "json/decoder.py").read_bytes()
    start, stop = documents.bounds(i, i + 1).tolist()
    assert stop - start == len(content) + 1
    assert piece(documents, i, 100, 200) == content[100:200]


def test_files_folders_and_globs_give_each_document_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, b_txt="bee", a_txt="ay", deep__er__c_txt="sea", deep__d_md="dee", empty_txt="", _git__blob="no text")
    monkeypatch.chdir(tmp_path)
    everything = {"a.txt": b"ay", "b.txt": b"bee", "deep/d.md": b"dee", "deep/er/c.txt": b"sea"}
    assert whole(text(".")) == everything
    assert list(text(".").names) == sorted(everything)
    assert whole(text("**")) == everything
    assert whole(text("b.txt", "./deep/../b.txt", "*.txt", tmp_path, "deep")) == everything
    assert list(text("**/*.txt").names) == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert list(text("dee?").names) == ["d.md", "er/c.txt"]
    assert list(text("b.txt", "a.txt").names) == ["a.txt", "b.txt"]
    monkeypatch.setenv("HOME", str(tmp_path / "deep"))
    assert list(text("~/er").names) == ["c.txt"]


def test_existing_name_with_brackets_is_not_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "notes[1].txt").write_text("one")
    (tmp_path / "notes1.txt").write_text("other")
    assert whole(text(tmp_path / "notes[1].txt")) == {"notes[1].txt": b"one"}


def test_text_corpus_reads_any_slice_of_any_bytes(tmp_path: Path) -> None:
    rng = random.Random(1)
    content = rng.randbytes(100_000)
    (tmp_path / "noise.bin").write_bytes(content)
    documents = text(tmp_path / "noise.bin")  # a file that is named is read, whatever it holds
    for _ in range(200):
        start, stop = sorted(rng.choices(range(len(content) + 1), k=2))
        assert piece(documents, 0, start, stop) == content[start:stop]


def test_loop_of_links_in_a_folder_ends(tmp_path: Path) -> None:
    write(tmp_path, in__a_txt="text")
    (tmp_path / "in" / "again").symlink_to(tmp_path)
    assert whole(text(tmp_path)) == {"a.txt": b"text"}


def test_memory_corpus_keeps_its_texts() -> None:
    corpus = MemoryCorpus(("né", "", "third"))
    assert corpus.read(0, corpus.tokens).tolist() == [*"né".encode(), END, *b"third", END]
    assert corpus.bounds(0, 2).tolist() == [0, 4, 10]
    assert [corpus.find(i) for i in (0, 3, 4, 9)] == [0, 0, 1, 1]
    assert corpus.starts(0, 4).tolist() == [0]
    assert corpus.starts(1, 5).tolist() == [4]


def test_text_corpus_is_one_stream_with_end_tokens(tmp_path: Path) -> None:
    rng = random.Random(3)
    texts = [rng.randbytes(rng.randint(1, 9)) for _ in range(30)]
    for i, content in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_bytes(content)
    corpus = text(tmp_path)
    stream = [token for content in texts for token in (*content, END)]
    assert corpus.tokens == len(stream)
    for _ in range(300):
        start, stop = sorted(rng.choices(range(len(stream) + 1), k=2))
        assert corpus.read(start, stop).tolist() == stream[start:stop]


def test_all_problems_of_paths_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hollow").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    problems = problems_of(Data(source="text", paths=("nowhere.txt", "*.nothing", "hollow", "dangling", " ")))
    assert len(problems) == 5
    assert f'"nowhere.txt" matches no file or folder (tried {tmp_path}/nowhere.txt)' in problems[0]
    assert f'"*.nothing" matches no file or folder (tried {tmp_path}/*.nothing)' in problems[1]
    assert f'"hollow" holds no files (looked through {tmp_path}/hollow)' in problems[2]
    assert "empty path" in problems[3]
    assert f"{tmp_path}/dangling cannot be read (No such file or directory)" in problems[4]
    assert all("data.paths" in problem and ";" in problem for problem in problems)


def test_broken_link_inside_a_folder_is_reported(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text")
    for name in "xyz":
        (tmp_path / f"{name}.txt").symlink_to(tmp_path / "gone")
    (problem,) = problems_of(Data(source="text", paths=(str(tmp_path),)))
    assert f"{tmp_path}/x.txt cannot be read" in problem
    assert "nor can 2 more" in problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_text_files_without_permission_are_named(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text").joinpath("a.txt").chmod(0)
    (problem,) = problems_of(Data(source="text", paths=(str(tmp_path),)))
    assert f"{tmp_path}/a.txt cannot be read (Permission denied)" in problem


def test_file_permission_is_checked_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a_txt="text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (problem,) = problems_of(Data(source="text", paths=(str(tmp_path / "a.txt"),)))
    assert f"{tmp_path}/a.txt cannot be read (Permission denied)" in problem


def test_special_file_is_refused_as_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (problem,) = problems_of(Data(source="text", paths=(str(tmp_path / "pipe"),)))
    assert "neither a file nor a folder" in problem


def test_source_of_empty_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, a_txt="", b_txt="")
    (problem,) = problems_of(Data(source="text", paths=(str(tmp_path),)))
    assert f"all 2 files are empty (the first is {tmp_path}/a.txt)" in problem
    (problem,) = problems_of(Data(source="text", paths=(str(tmp_path / "b.txt"),)))
    assert f"data.paths: {tmp_path}/b.txt is empty" in problem


def test_a_source_without_text_is_refused() -> None:
    assert "data.paths names nothing" in problems_of(Data(source="text"))[0]
    assert "data.documents holds no text" in problems_of(Data(source="memory"))[0]
    assert "data.documents holds no text" in problems_of(Data(source="memory", documents=("", "")))[0]


def test_problems_of_a_mixture_name_their_source(tmp_path: Path) -> None:
    mix = (
        MixedSource(name="wiki", source="text", paths=(str(tmp_path / "nowhere"),)),
        MixedSource(name="web", source="memory"),
        MixedSource(name="fine", source="memory", documents=("text that is long enough" * 100,)),
    )
    problems = problems_of(Data(mix=mix))
    assert len(problems) == 2
    assert problems[0].startswith(f'data.mix.wiki.paths: "{tmp_path}/nowhere" matches no file')
    assert problems[1].startswith('data.mix.web.source = "memory" but data.mix.web.documents')


def test_stdlib_without_source_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (problem,) = problems_of(Data())
    assert f"no Python source below {tmp_path}" in problem


def test_text_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, a_txt="0123456789")
    documents = text(tmp_path)
    assert piece(documents, 0, 8, 10) == b"89"
    os.truncate(tmp_path / "a.txt", 6)
    assert piece(documents, 0, 2, 6) == b"2345"
    for start, stop in [(2, 10), (8, 10)]:
        with pytest.raises(RunFailed, match=rf"{tmp_path}/a.txt has shrunk to 6 bytes since the run started"):
            piece(documents, 0, start, stop)


def test_text_file_that_vanishes_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, a_txt="0123456789")
    documents = text(tmp_path)
    os.remove(tmp_path / "a.txt")
    with pytest.raises(RunFailed, match=rf"{tmp_path}/a.txt can no longer be read \(No such file"):
        piece(documents, 0, 0, 5)


def many(root: Path, count: int = 200) -> tuple[TextFileCorpus, list[bytes]]:
    contents = [f"{i}:".encode() * 50 for i in range(count)]
    for i, content in enumerate(contents):
        (root / f"{i:03}").write_bytes(content)
    return text(root), contents


def test_text_corpus_keeps_few_files_open(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    documents, contents = many(tmp_path)
    for i, content in enumerate(contents):
        assert piece(documents, i, 3, 9) == content[3:9]
    assert len(os.listdir("/dev/fd")) - before <= 64
    del documents
    assert len(os.listdir("/dev/fd")) == before


def test_threads_read_a_text_corpus_concurrently(tmp_path: Path) -> None:
    documents, contents = many(tmp_path)
    wrong: list[int] = []

    def reader(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(3000):
            i = rng.randrange(len(contents))
            if piece(documents, i, 0, 20) != contents[i][:20]:
                wrong.append(i)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_reads_a_text_corpus_with_its_parent(tmp_path: Path) -> None:
    documents, contents = many(tmp_path)
    stop = threading.Event()

    def reader() -> None:
        i = 0
        while not stop.is_set():
            piece(documents, i % 200, 0, 10)
            i += 1

    def all_right() -> bool:
        return all(piece(documents, i, 2, 12) == contents[i][2:12] for i in range(200))

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if all_right() else 1)
            assert all_right()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_corpus_fingerprint_depends_on_names_and_texts_not_on_the_folder(tmp_path: Path) -> None:
    files = {"a_txt": "one", "deep__b_txt": "two"}
    prints = [text(write(tmp_path / place, **files)).fingerprint for place in ("here", "there")]
    assert prints[0] == prints[1]
    changed = [
        {**files, "a_txt": "ones"},
        {**files, "a_txt": "ono"},  # of the same length
        {**files, "c_txt": "x"},
        {"a_txt": "one"},
        {"b_txt": "one", "deep__b_txt": "two"},
        {"a_txt": "onetwo"},
    ]
    prints += [text(write(tmp_path / str(i), **change)).fingerprint for i, change in enumerate(changed)]
    assert len(set(prints)) == 1 + len(changed)


def test_fingerprint_of_a_large_corpus_samples_its_whole_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_HASHED_WHOLE", 400)
    monkeypatch.setattr(source_module, "_SAMPLES", 10)
    content = random.Random(0).randbytes(100_000)
    (tmp_path / "a.txt").write_bytes(content)
    corpus = text(tmp_path)
    asked: list[tuple[int, int]] = []
    plain = TextFileCorpus.read
    monkeypatch.setattr(
        TextFileCorpus, "read", lambda self, start, stop: asked.append((start, stop)) or plain(self, start, stop)
    )
    before = corpus.fingerprint
    assert sum(stop - start for start, stop in asked) == 400
    assert (asked[0][0], asked[-1][1]) == (0, 100_001)
    assert max(b[0] - a[1] for a, b in pairwise(asked)) < 12_000
    for at in (0, asked[5][0] + 20, 99_999):
        (tmp_path / "a.txt").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert text(tmp_path).fingerprint != before


def test_corpus_fingerprint_is_the_same_in_another_process() -> None:
    code = "from phalanx.data.corpus import *; print(MemoryCorpus(['a', 'bc']).fingerprint)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == MemoryCorpus(["a", "bc"]).fingerprint
    assert len({MemoryCorpus(texts).fingerprint for texts in (["a", "bc"], ["ab", "c"], ["abc"], ["bc", "a"])}) == 4
