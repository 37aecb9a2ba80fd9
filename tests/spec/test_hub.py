"""Names of the Hugging Face hub in run files: what they mean, which files are read, and what is said when they cannot be had. Runs are loaded
by processes of their own, because `huggingface_hub` reads its variables once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import hub_server
import pytest
from hub_server import TOKEN, Hub

from phalanx.data.tokenizer import open_tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.hub import HubName, parse
from phalanx.spec.model import ModelSpec
from phalanx.spec.pinned_names import keep_commits, moved_names
from phalanx.spec.run import Data, MixedSource, Run
from phalanx.spec.sources import vocabulary_size

RUN = """
[model]
from = "org/tiny"
[train]
batch = 8
steps = 10
sequence_length = 32
"""
_LOAD = """
import json, sys
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
for name in json.loads(sys.argv[2]):
    sys.modules[name] = None  # not installed
for overrides in json.loads(sys.argv[1]):
    try:
        run = load("run.toml", overrides)
        answer = {"from": run.model.from_, "tokenizer": run.data.tokenizer, "vocab": run.model.vocab, "dim": run.model.dim,
                  "paths": [list(source.paths) for source in (run.data, *run.data.mix)]}
    except RunError as error:
        answer = list(error.problems)
    print(json.dumps(answer))
"""
A, B = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    hf_models.save(folder, "qwen3")
    return folder


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server.serve() as hub:
        yield hub


def load(hub: Hub, cwd: Path, *overrides: Sequence[str], missing: Sequence[str] = (), **settings: Any) -> list[Any]:
    """What each load of the run file gives, in one process."""
    hub.asked.clear()
    (cwd / "run.toml").write_text(RUN)
    command = [sys.executable, "-c", _LOAD, json.dumps(overrides), json.dumps(missing)]
    env = hub.environment(cwd / "cache", **settings)
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpt2", HubName("gpt2", "main", None)),
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", "main", None)),
        ("org/name@v1.0", HubName("org/name", "v1.0", None)),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1", None)),
        (f"org/name@{A}", HubName("org/name", A, A)),
        (f"org/name@main@{A}", HubName("org/name", "main", A)),
    ],
)
def test_names(text: str, name: HubName) -> None:
    assert parse(text) == name
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["./gpt2", "/data/gpt2", "~/gpt2", "a/b/c", "s3://a/b", "out/tokenizer.json", "a..b", "a--b", "-a/b", "a b", "", "org/", "org/name@",
     "org/name@a@b", f"org/name@{A}@{B}@{A}", "x" * 97, "naïve"],
)  # fmt: skip
def test_texts_that_are_no_names(text: str) -> None:
    assert parse(text) is None


def test_a_model_by_name_is_the_model_of_its_folder(hub: Hub, weights: Path, tmp_path: Path) -> None:
    repository = hub.add("org/tiny", weights)
    (commit,) = repository.commits
    by_name, by_folder = load(hub, tmp_path, [], [f"model.from={weights}"])
    pinned = f"org/tiny@main@{commit}"
    assert by_name == by_folder | {"from": pinned, "tokenizer": pinned}
    assert not any("safetensors" in request for request in hub.asked), "weights are not needed to load a run"
    assert load(hub, tmp_path, [], offline=True) == [by_name]
    assert load(hub, tmp_path, [f"model.from={pinned}"], [f"model.from=org/tiny@{commit}"]) == [
        by_name,
        by_name | {"from": f"org/tiny@{commit}", "tokenizer": f"org/tiny@{commit}"},
    ]
    assert hub.asked == [], "a commit in the cache needs no network"


def test_revisions(hub: Hub, weights: Path, tmp_path: Path) -> None:
    repository = hub.add("org/tiny", weights)
    (first,) = repository.commits
    files = repository.commits[first]
    second = repository.commit(files | {"README.md": b"changed"}, "next")
    on_main, on_next, by_commit = load(hub, tmp_path, [], ["model.from=org/tiny@next"], [f"model.from=org/tiny@{second}"])
    assert on_main["from"] == f"org/tiny@main@{first}"
    assert on_next["from"] == f"org/tiny@next@{second}"
    assert by_commit["from"] == f"org/tiny@{second}"


def test_a_tokenizer_and_datasets_by_name(hub: Hub, weights: Path, tmp_path: Path) -> None:
    hub.add("words", {name: (weights / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")})
    (words,) = hub.models["words"].commits
    (text,) = hub.add("org/text", {"train.jsonl": b'{"text": "a"}\n'}, dataset=True).commits
    preset = ["model.preset=tiny-dense", "data.tokenizer=words", "data.source=hf", "data.paths=['org/text']"]
    (tmp_path / "run.toml").write_text(RUN)
    run = RUN.replace('from = "org/tiny"', "")
    answer = _load_text(hub, tmp_path, run, preset)
    vocab = max(json.loads((weights / "tokenizer.json").read_text())["model"]["vocab"].values()) + 1
    assert answer == {
        "from": None, "tokenizer": f"words@main@{words}", "vocab": vocab, "dim": 64, "paths": [[f"org/text@main@{text}"]]
    }  # fmt: skip


def _load_text(hub: Hub, cwd: Path, text: str, overrides: Sequence[str]) -> Any:
    (cwd / "other.toml").write_text(text)
    code = _LOAD.replace('"run.toml"', '"other.toml"')
    command = [sys.executable, "-c", code, json.dumps([overrides]), "[]"]
    ended = subprocess.run(command, cwd=cwd, env=hub.environment(cwd / "cache"), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_folder_of_that_name_takes_precedence(hub: Hub, weights: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", {"config.json": b"{}"})
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(weights)
    (answer,) = load(hub, tmp_path, [])
    assert (answer["from"], answer["tokenizer"], hub.asked) == ("org/tiny", "org/tiny", [])


def test_closed_and_missing_repositories(hub: Hub, weights: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", weights)
    hub.add("org/gated", weights, gated=True)
    hub.add("org/private", weights, private=True)
    hub.add("org/empty", {"README.md": b"nothing"})
    names = ("org/none", "org/private", "org/gated", "org/tiny@v9", "org/empty")
    overrides = [[f"model.from={name}"] for name in names]
    (none,), (private,), (gated,), (revision,), (empty,) = load(hub, tmp_path, *overrides)
    for name, sentence in (("org/none", none), ("org/private", private)):
        assert sentence.startswith(f'command line: model.from={name}: model.from = "{name}" does not exist: name a folder')
        assert f"hub that this machine may read ({hub.url}/{name})" in sentence and "HF_TOKEN" in sentence
    assert f"{hub.url}/org/gated is gated: accept its terms there" in gated and "does not exist" not in gated
    assert f'{hub.url}/org/tiny has no branch, tag or commit "v9"' in revision
    assert "has no config.json" in empty
    _, private, *_ = load(hub, tmp_path, *overrides, token=TOKEN)
    assert private["from"].startswith("org/private@main@")
    (wrong,) = load(hub, tmp_path, [], token="hf_expired")[0]
    assert "does not accept the token of this machine (401)" in wrong and "hf auth login" in wrong


def test_without_a_network(hub: Hub, weights: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", weights)
    (offline,), others = load(hub, tmp_path, [], ["model.from=org/tiny@v2", "data.tokenizer=gpt2"], offline=True)
    assert hub.asked == []
    assert 'run.toml:3: model.from = "org/tiny" does not exist' in offline and "HF_HUB_OFFLINE is set" in offline
    assert "`hf download org/tiny --local-dir FOLDER`, copy FOLDER here, and name it instead" in offline
    assert str(tmp_path / "cache" / "hub") in offline
    assert "`hf download org/tiny --revision v2 --local-dir FOLDER`" in others[0] and "hf download gpt2" in others[1]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hub.url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ((gone,),) = load(hub, tmp_path, [])
    assert f"{hub.url} cannot be reached" in gone and "hf download org/tiny" in gone


def test_a_hub_that_is_down_is_not_needed_for_what_is_in_the_cache(hub: Hub, weights: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", weights)
    before = load(hub, tmp_path, [])
    hub.down = True
    assert load(hub, tmp_path, []) == before
    ((sentence,),) = load(hub, tmp_path, ["model.from=org/other"])
    assert "503" in sentence


def test_the_package_is_missing(hub: Hub, tmp_path: Path) -> None:
    ((sentence,),) = load(hub, tmp_path, [], missing=["huggingface_hub"])
    assert "needs the package huggingface_hub: pip install 'phalanx[hub]'" in sentence


def run_of(model: str, tokenizer: str, *paths: str) -> Run:
    data = Data(tokenizer=tokenizer, mix=(MixedSource(name="one", source="hf", paths=paths),))
    return Run(model=ModelSpec(from_=model, vocab=300), data=data)


def test_a_branch_that_has_moved_does_not_change_a_run() -> None:
    recorded = run_of(f"org/m@main@{A}", f"org/t@v1@{A}", f"org/d@main@{A}")
    now = run_of(f"org/m@main@{B}", f"org/t@v1@{B}", f"org/d@main@{B}")
    assert keep_commits(now, recorded) == recorded
    sentences = moved_names(now, recorded)
    assert len(sentences) == 3 and all(A[:12] in sentence and B[:12] in sentence for sentence in sentences)
    assert keep_commits(run_of("org/m", "org/t@v1", "org/d"), recorded) == recorded, "without a network"
    assert keep_commits(recorded, recorded) == recorded and moved_names(recorded, recorded) == []
    old = run_of("m", "t", "org/d")
    assert keep_commits(run_of("m", "t", f"org/d@main@{A}"), old) == old, "recorded by a version that did not pin datasets"


def test_what_was_asked_for_is_not_replaced() -> None:
    recorded = run_of(f"org/m@main@{A}", f"org/t@main@{A}", f"org/d@main@{A}")
    for now in (
        run_of(f"org/m@{B}", f"org/t@{B}", f"org/d@{B}"),
        run_of(f"org/m@next@{B}", f"org/t@next@{B}", f"org/d@next@{B}"),
        run_of(f"other/m@main@{B}", f"other/t@main@{B}", f"other/d@main@{B}"),
    ):
        assert keep_commits(now, recorded) == now
    same = run_of(f"org/m@{A}", f"org/t@{A}", f"org/d@{A}")
    assert keep_commits(same, recorded) == recorded, "another name of the same commit"
    assert replace(recorded, model=same.model) != recorded


def test_a_host_whose_cache_lacks_a_pinned_commit_is_told_what_to_download() -> None:
    name = f"org/m@main@{A}"
    for open_ in (vocabulary_size, open_tokenizer):
        with pytest.raises(RunError) as caught:
            open_(name)
        (sentence,) = caught.value.problems
        assert f"`hf download org/m --revision {A}`" in sentence and "HF_HOME" in sentence and name in sentence
