"""Commands that take names of the Hugging Face hub: the real ones, against a server that speaks its protocol."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hf_models
import hub_server
import pytest
from commands import Ended, InProcess, Workshop, losses
from hub_server import TOKEN, Hub

from phalanx.events.records import Warned, WeightsLoaded
from phalanx.spec.load import load

pytest.importorskip("huggingface_hub")
RUN = """
[model]
from = "org/tiny"
[data]
source = "text"
paths = ["text"]
cache = "tokens"
[train]
batch = 4
sequence_length = 32
steps = 2
[cluster]
device = "cpu"
cpu_ranks = 1
threads = 1
[checkpoint]
every = 2
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server.serve() as hub:
        yield hub


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, as large ones are published."""
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    hf_models.save(folder, "qwen3", max_shard_size="60kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Workshop]:
    shop = Workshop(tmp_path / "shop")
    shop.run_file.write_text(RUN)
    yield shop
    shop.close()


def phalanx(shop: Workshop, hub: Hub, *arguments: object, token: str | None = None, offline: bool = False) -> Ended:
    hub.asked.clear()
    return shop.run(*arguments, env=hub.environment(shop.path / "cache", token=token, offline=offline))


@pytest.mark.slow
def test_a_run_records_its_commit_and_goes_on_with_it(hub: Hub, weights: Path, shop: Workshop) -> None:
    repository = hub.add("org/tiny", weights)
    (first,) = repository.commits
    ended = phalanx(shop, hub, "train", "tiny.toml", "--run-dir", "named", "--json")
    assert ended.code == 0, ended
    pinned = f"org/tiny@main@{first}"
    recorded = (shop.path / "named" / "run.toml").read_text()
    assert f'from = "{pinned}"' in recorded and f'tokenizer = "{pinned}"' in recorded
    (loaded,) = [event for event in shop.events("named") if isinstance(event, WeightsLoaded)]
    assert loaded.path == pinned
    asked = [request for request in hub.asked if "/revision/" in request]
    assert asked == ["GET /api/models/org/tiny/revision/main"], "one lookup for the launcher and all that it starts"

    ended = phalanx(shop, hub, "train", "tiny.toml", f"model.from={weights}", "--run-dir", "local", "--json")
    assert ended.code == 0, ended
    assert losses(shop.events("named")) == losses(shop.events("local"))

    files = repository.commits[first]
    second = repository.commit(files | {"tokenizer_config.json": b"{}", "README.md": b"new"})
    ended = phalanx(shop, hub, "train", "tiny.toml", "train.steps=4", "--run-dir", "named", "--json")
    assert ended.code == 0 and ended.json["steps"] == 4, ended
    assert f'from = "{pinned}"' in (shop.path / "named" / "run.toml").read_text()
    (moved,) = {
        event.message for event in shop.events("named") if isinstance(event, Warned) and "on the hub now" in event.message
    }
    assert first[:12] in moved and second[:12] in moved
    refused = phalanx(shop, hub, "train", "tiny.toml", f"model.from=org/tiny@{second}", "--run-dir", "named")
    assert refused.code == 2 and "model.from" in refused.err and "other settings" in refused.err


def test_generate_import_and_eval(hub: Hub, weights: Path, shop: Workshop) -> None:
    hub.add("org/tiny", weights)
    refused = phalanx(shop, hub, "eval", "org/tiny", "--device", "cpu")
    assert refused.code == 2 and "which has no held-out text" in refused.err
    assert not any("safetensors" in request for request in hub.asked), "refused before weights are downloaded"
    options = ("the quick", "--tokens", 12, "--device", "cpu", "--json")
    by_name = phalanx(shop, hub, "generate", "org/tiny", *options)
    by_folder = phalanx(shop, hub, "generate", weights, *options)
    assert by_name.code == by_folder.code == 0, by_name
    assert by_name.json["text"] == by_folder.json["text"] != ""
    by_name = phalanx(shop, hub, "import", "org/tiny", "named", offline=True)
    by_folder = phalanx(shop, hub, "import", weights, "local")
    assert by_name.code == by_folder.code == 0, by_name
    assert _contents(shop.path / "named" / "checkpoints", r"\.bin|tensors") == _contents(
        shop.path / "local" / "checkpoints", r"\.bin|tensors"
    )
    assert _contents(shop.path / "named" / "tokenizer") == _contents(shop.path / "local" / "tokenizer")


def _contents(folder: Path, pattern: str = "") -> dict[str, bytes]:
    files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    chosen = {name: data for name, data in files.items() if re.search(pattern, name)}
    assert chosen, files.keys()
    return chosen


def test_names_that_are_neither_paths_nor_repositories(hub: Hub, shop: Workshop) -> None:
    for command in (("generate", "runs/none", "x"), ("import", "runs/none", "out")):
        ended = phalanx(shop, hub, *command)
        assert ended.code == 2 and "runs/none is not a directory" in ended.err, ended
        assert "Nor is it a model of the Hugging Face hub" in ended.err and "Traceback" not in ended.err


@pytest.mark.slow
def test_an_interrupted_download_is_continued(hub: Hub, weights: Path, shop: Workshop) -> None:
    hub.add("org/tiny", weights)
    hub.cut = 1000
    ended = phalanx(shop, hub, "import", "org/tiny", "out")
    assert ended.code == 2 and "was interrupted" in ended.err and "run the same command again" in ended.err, ended
    assert not (shop.path / "out").exists() and "Traceback" not in ended.err
    hub.cut = None
    ended = phalanx(shop, hub, "import", "org/tiny", "out")
    assert ended.code == 0, ended
    assert not any("config.json" in request for request in hub.asked), "complete files are not downloaded again"
    assert any(request.startswith("GET /stored/") for request in hub.asked)


@pytest.mark.slow
def test_a_dataset_by_name(hub: Hub, shop: Workshop) -> None:
    pytest.importorskip("datasets")
    lines = [json.dumps({"text": f"line {number} of some text"}) for number in range(40)]
    repository = hub.add("org/text", {"train.jsonl": "\n".join(lines).encode(), "README.md": b"# Text\n"}, dataset=True)
    (first,) = repository.commits
    ended = phalanx(shop, hub, "data", "inspect", "org/text", "--source", "hf", "--json")
    assert ended.code == 0 and ended.json["sources"]["hf"]["documents"] == 40, ended
    repository.commit({"train.jsonl": "\n".join(lines[:7]).encode(), "README.md": b"# Text\n"})
    for name, documents in (("org/text", 7), (f"org/text@{first}", 40)):
        ended = phalanx(shop, hub, "tokenize", name, f"tokens-{documents}", "--source", "hf", "--json")
        assert ended.code == 0 and ended.json["documents"] == documents, ended
    ended = phalanx(shop, hub, "tokenize", "org/none", "out", "--source", "hf")
    assert ended.code == 2 and "Nor is it a dataset of the Hugging Face hub" in ended.err, ended
    ended = phalanx(shop, hub, "tokenize", "org/unseen", "out", "--source", "hf", offline=True)
    assert ended.code == 2 and "hf download org/unseen --repo-type dataset --local-dir FOLDER" in ended.err, ended


@pytest.mark.slow
def test_a_pushed_model_has_the_files_of_an_export(hub: Hub, weights: Path, shop: Workshop) -> None:
    assert phalanx(shop, hub, "import", weights, "run").code == 0
    ended = phalanx(shop, hub, "export", "run", "--push", "org/new", "--private", "--json", token=TOKEN)
    assert ended.code == 0, ended
    assert phalanx(shop, hub, "export", "run", "out", "--json").code == 0
    repository = hub.models["org/new"]
    exported = _contents(shop.path / "out")
    files = dict(repository.commits[repository.branches["main"]])
    assert files.pop(".gitattributes") and files == exported
    assert repository.private
    commit = repository.branches["main"]
    assert ended.json["pushed"] == {"repository": "org/new", "branch": "main", "commit": commit, "url": f"{hub.url}/org/new"}

    ended = phalanx(
        shop, hub, "export", "run", "sharded", "--shard-size", "60kB", "--push", "org/new", "--revision", "half", "--dtype", "bf16", token=TOKEN
    )  # fmt: skip
    assert ended.code == 0 and f"{hub.url}/org/new/tree/half" in ended.shown, ended
    files = dict(repository.commits[repository.branches["half"]])
    assert files.pop(".gitattributes") and files == _contents(shop.path / "sharded")
    assert "model.safetensors" not in files, "weights of an earlier push are removed"
    assert repository.branches["main"] == commit
    ended = phalanx(shop, hub, "export", "run", "kept", "--push", "others/new", token=TOKEN)
    assert ended.code == 1 and "may not write there (403)" in ended.err and "Traceback" not in ended.err, ended
    assert _contents(shop.path / "kept") == exported


def test_a_push_that_is_not_allowed_is_refused_before_the_export(hub: Hub, shop: Workshop) -> None:
    for repository, token, sentence in (
        ("org/new", None, "HF_TOKEN"),
        ("org/new", "hf_expired", "does not accept the token"),
        ("a/b/c", TOKEN, 'name a repository as "organization/name"'),
    ):
        ended = phalanx(shop, hub, "export", "not-looked-at", "out", "--push", repository, token=token)
        assert ended.code == 2 and sentence in " ".join(ended.err.split()), ended
        assert "Traceback" not in ended.err and not (shop.path / "out").exists()
    ended = phalanx(shop, hub, "export", "not-looked-at", "--push", "org/new", token=TOKEN, offline=True)
    assert ended.code == 2 and "HF_HUB_OFFLINE is set" in ended.err
    assert hub.models == {}


def test_options_of_a_push(here: InProcess) -> None:
    ended = here("export", "run", "out", "--private")
    assert ended.code == 2 and "--private describes an upload: add --push REPO" in ended.err
    ended = here("export", "run")
    assert ended.code == 2 and "HF_DIR" in ended.err and "--push" in ended.err


@pytest.mark.slow
def test_the_resolved_run_file_of_another_machine(hub: Hub, weights: Path, shop: Workshop) -> None:
    """A resolved run file names commits. A machine without their files downloads them, or says what to download."""
    hub.add("org/tiny", weights)
    (commit,) = hub.models["org/tiny"].commits
    assert phalanx(shop, hub, "train", "tiny.toml", "--run-dir", "first", "--json").code == 0
    resolved = shop.path / "first" / "run.toml"
    assert load(resolved).model.from_ == f"org/tiny@main@{commit}"
    (shop.path / "cache").rename(shop.path / "of-another-machine")
    (shop.path / "tokens").rename(shop.path / "old-tokens")
    ended = phalanx(shop, hub, "train", resolved, "--run-dir", "second", offline=True)
    assert ended.code == 2 and f"hf download org/tiny --revision {commit}" in ended.err, ended
    ended = phalanx(shop, hub, "train", resolved, "--run-dir", "second", "--json")
    assert ended.code == 0, ended
    assert losses(shop.events("second")) == losses(shop.events("first"))


@pytest.mark.slow
def test_ranks_of_torchrun_look_a_name_up_once(hub: Hub, weights: Path, shop: Workshop) -> None:
    hub.add("org/tiny", weights)
    (commit,) = hub.models["org/tiny"].commits
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "phalanx"]
    settings = ("layout.data=2", "train.micro_batch=2", "--run-dir", "named", "--json")
    ended = shop.run("train", "tiny.toml", *settings, program=program, env=hub.environment(shop.path / "cache"))
    assert ended.code == 0, ended
    assert hub.asked.count("GET /api/models/org/tiny/revision/main") == 1, hub.asked
    assert load(shop.path / "named" / "run.toml").model.from_ == f"org/tiny@main@{commit}"
    assert len(losses(shop.events("named"))) == 2
