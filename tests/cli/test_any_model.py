"""A model of transformers as a user trains it: from a folder, through a crash and on other layouts, to a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import InProcess, StepLosses, Workshop
from hf_families import config, theirs
from hf_models import save_tokenizer
from safetensors.torch import load_file

from phalanx.checkpointing.location import open_location
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.events.records import Exported, Restored

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def prepare(shop: Workshop, name: str) -> Any:
    """A folder of weights, and a run file that starts from it."""
    model = theirs(name)
    model.save_pretrained(shop.path / "weights")
    save_tokenizer(shop.path / "weights")
    text = shop.run_file.read_text()
    # With both keys the code of transformers runs, whether or not the built-in decoder computes the family.
    shop.run_file.write_text('[model]\nfrom = "weights"\nconfig = "weights"\n\n' + text[text.index("[data]") :])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "olmoe"])
def test_train_resume_on_another_layout_export_and_load(workshop: Workshop, losses: StepLosses, name: str) -> None:
    prepare(workshop, name)
    workshop.train("layout.data=2", "--run-dir", "whole")
    expected = losses(workshop.events("whole"))
    workshop.copy("whole", "parts")
    shutil.rmtree(workshop.path / "parts" / "checkpoints" / "step-00000008")
    workshop.train("layout.data=1", "layout.shard=2", "layout.zero=3", "checkpoint.export_hf=true", "--run-dir", "parts")
    events = workshop.events("parts")
    assert [event.step for event in events if isinstance(event, Restored)] == [4]
    for (step, loss, _), (other, resumed, _) in zip(expected[4:], losses(events)[-4:], strict=True):
        assert step == other and abs(loss - resumed) < 1e-4 * loss
    exported = [event for event in events if isinstance(event, Exported)]
    assert [event.step for event in exported] == [4, 8], "what was restored had no export yet"
    assert all(event.difference is not None and event.difference < 1e-4 for event in exported)
    shutil.rmtree(workshop.path / "weights")  # the run directory stands alone
    ended = workshop.run("export", "parts", "out", "--json")
    assert ended.code == 0, ended
    reader = CheckpointReader(open_location(workshop.path / "parts" / "checkpoints" / "step-00000008"))
    again = transformers.AutoModelForCausalLM.from_pretrained(workshop.path / "out")
    assert again.config.model_type == config(name).model_type
    for key, value in again.state_dict().items():
        assert torch.equal(value, reader.read(f"model/{key}")), key
    for key, value in load_file(workshop.path / "out" / "model.safetensors").items():
        assert torch.equal(value, again.state_dict()[key]), key
    made = workshop.run("generate", "parts", "the quick", "--tokens", 4, "--temperature", 0, "--json")
    assert made.code == 0 and made.json["tokens"] == 4, made
    checked = workshop.run("checkpoint", "verify", "parts", "--json")
    assert checked.code == 0, checked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "mixtral"])
def test_from_tensor_ranks_to_one_rank_to_stages_and_out(workshop: Workshop, losses: StepLosses, name: str) -> None:
    """Trained on two tensor ranks; gone on with on one rank, and on two stages; each export is what transformers loads to the bit."""
    prepare(workshop, name)
    workshop.train("layout.data=1", "layout.tensor=2", "--run-dir", "tensor")
    expected = losses(workshop.events("tensor"))
    for other in ("tensor", "pipeline"):
        parts = f"then-{other}"
        workshop.copy("tensor", parts)
        shutil.rmtree(workshop.path / parts / "checkpoints" / "step-00000008")
        degrees = ("layout.tensor=1",) if other == "tensor" else ("layout.tensor=1", "layout.pipeline=2")
        workshop.train("layout.data=1", *degrees, "--run-dir", parts)
        events = workshop.events(parts)
        assert [event.step for event in events if isinstance(event, Restored)] == [4]
        for (step, loss, _), (again, resumed, _) in zip(expected[4:], losses(events)[-4:], strict=True):
            assert step == again and abs(loss - resumed) < 1e-4 * loss
        assert workshop.run("export", parts, f"out-{other}", "--json").code == 0
        reader = CheckpointReader(open_location(workshop.path / parts / "checkpoints" / "step-00000008"))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(workshop.path / f"out-{other}")
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, reader.read(f"model/{key}")), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [("olmoe", ("layout.data=2",)), ("phi3", ("layout.data=1", "layout.tensor=2"))], ids=["data", "tensor"]
)
def test_a_killed_rank_is_replaced_as_for_presets(
    workshop: Workshop, losses: StepLosses, name: str, layout: tuple[str, ...]
) -> None:
    prepare(workshop, name)
    workshop.train(*layout, "--run-dir", "calm")
    workshop.train(*layout, "--run-dir", "disturbed", "--chaos", "kill rank=1 step=6")
    events = workshop.events("disturbed")
    assert any(isinstance(event, Restored) for event in events)
    steps = {step: loss for step, loss, _ in losses(events)}
    assert steps == {step: loss for step, loss, _ in losses(workshop.events("calm"))}


@pytest.mark.slow
def test_what_only_the_model_itself_knows_is_refused_before_the_run_starts(workshop: Workshop) -> None:
    prepare(workshop, "bloom")
    ended = workshop.run("train", "tiny.toml", "--json")
    (problem,) = ended.json["error"]
    assert ended.code == 2 and not (workshop.path / "runs").exists()
    assert "data.document_mask = true, but model.config (bloom) cannot keep the documents of a sequence apart" in problem
    assert "Set data.document_mask = false" in problem
    workshop.train("data.document_mask=false", "train.steps=2")


def test_a_model_that_transformers_does_not_know_is_refused(here: InProcess, tmp_path: Path) -> None:
    values = json.loads(config("phi3").to_json_string(use_diff=False)) | {
        "model_type": "phi77",
        "architectures": ["Phi77ForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    (tmp_path / "run.toml").write_text(
        '[model]\nconfig = "config.json"\n[data]\npaths = ["text.txt"]\n[train]\nsteps = 2\nbatch = 2\nsequence_length = 16\n[cluster]\ndevice = "cpu"\n'
    )
    ended = here("train", "run.toml", "--json")
    (problem,) = ended.json["error"]
    assert ended.code == 2 and 'model_type = "phi77" is unknown to transformers' in problem
