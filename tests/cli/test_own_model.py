"""The example of one's own model, as the documentation tells people to use it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import StepLosses, Workshop

from phalanx.events.records import Evaluated, Restored
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
from phalanx.spec.model import ModelSpec
from phalanx.worker.measure_process import measure

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = (
    "train.sequence_length=32",
    "train.batch=8",
    "model.dim=32",
    "model.layers=2",
    "checkpoint.every=3",
    "train.eval_every=3",
)


@pytest.mark.slow
def test_custom_module_trains_resumes_and_generates(workshop: Workshop, losses: StepLosses) -> None:
    shutil.copytree(EXAMPLES, workshop.path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    whole = workshop.run("train", "examples/own_model.toml", *SHORT, "train.steps=6", "--run-dir", "whole", "--json")
    assert whole.code == 0 and not whole.complaints, whole
    expected = losses(workshop.events("whole"))
    earlier, later = (event.loss for event in workshop.events("whole") if isinstance(event, Evaluated))
    assert later < earlier, "the same held-out batches after step 3 and step 6"
    workshop.copy("whole", "parts")
    shutil.rmtree(workshop.path / "parts" / "checkpoints" / "step-00000006")
    more = workshop.run("train", "examples/own_model.toml", *SHORT, "train.steps=6", "--run-dir", "parts", "layout.data=1")
    assert more.code == 0, more
    events = workshop.events("parts")
    assert [event.step for event in events if isinstance(event, Restored)] == [3]
    assert losses(events)[-3:] == expected[3:], "one rank goes on exactly as two would have"
    made = [workshop.run("generate", "whole", "def ", "--tokens", 5, "--temperature", 0, "--json") for _ in range(2)]
    assert made[0].code == 0, made[0]
    assert made[0].json["tokens"] == 5 and made[0].json["text"] == made[1].json["text"]


def test_custom_module_that_fails_to_build_ends_the_command(workshop: Workshop) -> None:
    (workshop.path / "mine.py").write_text("import torch\n\nraise OSError('no weights today')\n")
    ended = workshop.run("train", "tiny.toml", "model.module=mine:Model", "--json")
    assert ended.code == 2, ended
    (sentence,) = ended.json["error"]
    assert "no weights today" in sentence and "mine.py, line 3" in sentence
    assert "Traceback" not in ended.err
    assert not (workshop.path / "runs").exists()


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLES / "own_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_module_scan_equals_the_recurrence(example: ModuleType) -> None:
    torch.manual_seed(0)
    keep, given = torch.rand(2, 13, 3), torch.randn(2, 13, 3)
    state, states = torch.zeros(2, 3), []
    for place in range(13):
        state = keep[:, place] * state + given[:, place]
        states.append(state)
    assert torch.allclose(example.scan(keep, given), torch.stack(states, dim=1), atol=1e-6)


def test_example_module_is_causal_and_respects_documents(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.Recurrent(ModelSpec(dim=16, layers=2, vocab=20))
    tokens = torch.randint(20, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    logits = model(tokens, positions)
    later = tokens.clone()
    later[0, 9:] = (later[0, 9:] + 1) % 20
    assert torch.equal(model(later, positions)[0, :9], logits[0, :9])
    first = tokens.clone()
    first[0, :5] = (first[0, :5] + 1) % 20
    assert torch.equal(model(first, positions)[0, 5:], logits[0, 5:])
    assert not torch.equal(model(first, positions)[0, :5], logits[0, :5])
    alone = model(tokens[:, 5:], positions[:, 5:])
    assert torch.allclose(alone, logits[:, 5:], atol=1e-6)


def test_example_run_file_loads() -> None:
    run = load(EXAMPLES / "own_model.toml")
    assert run.model.module == "examples.own_model:Recurrent"
    assert dict(run.model.options) == {"memory": 2.0}


def test_sequence_parallelism_of_the_recurrence_is_refused_by_what_mixes_positions() -> None:
    run = load(EXAMPLES / "own_model.toml", ["layout.tensor=2", "layout.sequence=true"])
    with pytest.raises(RunError, match=r"layout.sequence = true .*: pad in blocks.0 mixes positions. Remove layout.sequence"):
        measure(run)


def test_a_module_that_cannot_be_cut_is_refused_once_before_any_rank_starts(workshop: Workshop) -> None:
    shutil.copytree(EXAMPLES, workshop.path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    ended = workshop.run("train", "examples/own_model.toml", *SHORT, "model.dim=1", "layout.tensor=2", "--json")
    assert ended.code == 2, ended
    (sentence,) = ended.json["error"]
    assert sentence.startswith("layout.tensor = 2 has nothing to cut in model.module") and "Set layout.tensor = 1" in sentence
    assert "its 1 rows would leave one of 2 ranks without any" in sentence
    assert ended.shown.count("nothing to cut") == 2, "on standard error, and in the JSON object"
    assert not (workshop.path / "runs").exists()


@pytest.mark.slow
def test_the_example_is_proven_on_tensor_ranks(workshop: Workshop) -> None:
    shutil.copytree(EXAMPLES, workshop.path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    ended = workshop.run("verify", "examples/own_model.toml", *SHORT, "layout.tensor=2", "--steps", 2, "--json")
    assert ended.code == 0 and ended.json["passed"], ended


def test_inferred_cuts_are_printed(workshop: Workshop) -> None:
    shutil.copytree(EXAMPLES, workshop.path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    ended = workshop.run("models", "--axes", "examples/own_model.toml", "layout.tensor=4", "--json")
    assert ended.code == 0, ended
    assert ended.json["ranks"] == 4
    assert ended.json["axes"]["blocks.*.into.weight"] == [[["ffn", 128]] * 3, "model"]
    assert ended.json["axes"]["blocks.*.out.weight"] == ["model", "ffn"]
    assert '"blocks.*.out.weight": ("model", "ffn"),' in ended.err
    assert "blocks.0 … blocks.3 (4): 1 sum over the ranks in a forward." in ended.err
    assert "embed.weight" in ended.json["whole"]


@pytest.mark.slow
def test_plan_counts_the_module_itself(workshop: Workshop, example: ModuleType) -> None:
    shutil.copytree(EXAMPLES, workshop.path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    ended = workshop.run("plan", "examples/own_model.toml", "--json")
    assert ended.code == 0, ended
    whole = sum(p.numel() for p in example.Recurrent(ModelSpec(dim=128, layers=4, vocab=257)).parameters())
    assert ended.json["model"]["parameters"] == whole
    said = " ".join(ended.json["assumed"])
    assert f"{whole:,} parameters" in said and "bytes of activations per token" in said
    states = {name: ended.json["best"]["memory"][name] for name in ("parameters", "optimizer")}
    assert states == {"parameters": pytest.approx(4 * whole, rel=0.01), "optimizer": pytest.approx(8 * whole, rel=0.01)}
