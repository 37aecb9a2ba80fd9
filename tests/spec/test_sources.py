"""The kind of a source, told by the names in its paths."""

from pathlib import Path

import pytest

from phalanx.spec.run import Source
from phalanx.spec.sources import kind, kinds


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.txt", "text"), ("a.md", "text"), ("a.py", "text"), ("a.weird", "text"), ("a.txt.gz", "text"), ("a.zst", "text"),
        ("a.jsonl", "jsonl"), ("a.ndjson", "jsonl"), ("a.json", "jsonl"), ("dir.d/A.JSONL.GZ", "jsonl"), ("a.jsonl.zst", "jsonl"),
        ("a.json.zstd", "jsonl"), ("a.parquet", "parquet"), ("a/*.parquet", "parquet"), ("**/part-?.jsonl.gz", "jsonl"),
        ("s3://bucket/a.parquet", "parquet"), ("https://host/a.jsonl.zst?token=a.txt", "jsonl"), ("gs://bucket/folder/", "text"),
        ("somewhere/tokens.json", "tokens"),
    ],
)  # fmt: skip
def test_by_name(path: str, expected: str) -> None:
    assert kind(Source(paths=(path,))) == expected


def test_without_paths() -> None:
    assert kind(Source()) == "stdlib"
    assert kind(Source(documents=("x",))) == "memory"


def test_given() -> None:
    assert kinds(Source(source="chat", paths=("a.jsonl", "b.txt"))) == ["chat"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["b.jsonl", "a.txt"], "text"),
        (["a.jsonl", "b.txt"], "jsonl"),
        (["README.md", "LICENSE", ".hidden", "_SUCCESS", "part-0.parquet"], "parquet"),
        (["z/2.jsonl.gz", "z/3.txt"], "jsonl"),
        ([".git/a.txt", "y.parquet"], "parquet"),
        (["tokens.json", "0.bin"], "tokens"),
        (["dataset_info.json", "state.json", "data-00000-of-00001.arrow"], "hf"),
        (["dataset_dict.json", "train/state.json"], "hf"),
        (["noname"], "text"),
    ],
)
def test_folders(tmp_path: Path, files: list[str], expected: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert kinds(Source(paths=(str(tmp_path),))) == [expected]
    assert kinds(Source(paths=(f"{tmp_path}/",))) == [expected]


def test_a_pattern_without_a_suffix_is_told_by_what_it_matches(tmp_path: Path) -> None:
    (tmp_path / "part-0.jsonl").touch()
    assert kinds(Source(paths=(f"{tmp_path}/*",))) == ["jsonl"]
    assert kinds(Source(paths=(f"{tmp_path}/part-*",))) == ["jsonl"]
    assert kinds(Source(paths=(f"{tmp_path}/*.jsonl*",))) == ["jsonl"]
    assert kinds(Source(paths=(f"{tmp_path}/*.parquet*",))) == ["parquet"]  # of which there is none


def test_what_cannot_be_told_is_text(tmp_path: Path) -> None:
    gone = Source(paths=(str(tmp_path / "gone"), str(tmp_path / "gone*"), "nul\x00byte"))
    assert kinds(gone) == []
    assert kind(gone) == "text"


def test_names_that_disagree() -> None:
    assert kinds(Source(paths=("b.jsonl", "a.txt", "c.jsonl"))) == ["jsonl", "text"]
