"""LoRA and DPO as people use them: a Hugging Face folder is fine-tuned from a run file, stopped, resumed, asked for text and exported; what cannot be
right is refused before anything starts."""

from __future__ import annotations

import json
import math
import shutil

import hf_models
import pytest
from commands import Workshop

from phalanx.events.records import Restored, RunStarted, Step, WeightsLoaded

RUN = """\
[model]
from = "base"
[data]
paths = ["text"]
cache = "cache"
[train]
batch = 4
sequence_length = 32
steps = 6
[optimizer]
learning_rate = 1e-2
schedule = "constant"
[lora]
rank = 4
[cluster]
device = "cpu"
cpu_ranks = 2
threads = 1
[checkpoint]
every = 3
keep_last = 4
"""


@pytest.fixture
def shop(workshop: Workshop) -> Workshop:
    hf_models.save(workshop.path / "base", "llama")
    workshop.run_file.write_text(RUN)
    return workshop


@pytest.mark.slow
def test_train_resume_generate_evaluate_and_export(shop: Workshop) -> None:
    ended = shop.train("--run-dir", "whole")
    started, *_ = [event for event in shop.events("whole") if isinstance(event, RunStarted)]
    assert started.adapters == 8448 and started.parameters > 80_000
    # A run that stopped at step 3 goes on from its adapters and the folder, to the same end.
    shutil.copytree(shop.path / "whole", shop.path / "half")
    shutil.rmtree(shop.path / "half" / "checkpoints" / "step-00000006")
    (shop.path / "half" / "events.jsonl").unlink()
    shop.train("--run-dir", "half")
    events = shop.events("half")
    assert [event.step for event in events if isinstance(event, Restored)] == [3]
    assert any(isinstance(event, WeightsLoaded) for event in events)
    losses = {name: [e.loss for e in shop.events(name) if isinstance(e, Step)][-3:] for name in ("whole", "half")}
    assert losses["half"] == losses["whole"]
    evaluated = shop.run("eval", "whole", "--json").json
    assert evaluated["loss"] == pytest.approx(ended.json["eval_loss"], rel=1e-5)
    assert shop.run("generate", "whole", "the", "--tokens", "3", "--json").json["tokens"] == 3
    assert shop.run("export", "whole", "merged", "--json").json["family"] == "llama"
    exported = shop.run("export", "whole", "adapters", "--format", "peft", "--json").json
    assert exported["parameters"] == 8448 and (shop.path / "adapters" / "adapter_config.json").is_file()


def test_a_base_that_has_changed_is_refused_before_the_start(shop: Workshop) -> None:
    shop.train("--run-dir", "run", "train.steps=3")
    shutil.rmtree(shop.path / "base")
    hf_models.save(shop.path / "base", "llama", rms_norm_eps=1e-5)
    file = shop.path / "base" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x40  # one bit of the last weight
    file.write_bytes(data)
    refused = shop.run("train", shop.run_file.name, "--run-dir", "run", "train.steps=6")
    assert refused.code == 2 and "holds LoRA adapters of other weights than model.from" in refused.shown
    assert len([event for event in shop.events("run") if isinstance(event, RunStarted)]) == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['lora.targets=["q_proj"]'], '"q_proj" is no layer of this model: take query, key, value, output, gate, up or down'),
        (["lora.rank=40"], "lora.rank = 40 exceeds 16"),
        (["lora.base=int4"], "lora.base"),
        (["lora.base=nf4", "precision.compute=fp8"], 'set precision.compute = "bf16", or remove lora.base'),
        (["lora.dropout=1.5"], "lora.dropout = 1.5"),
        (["lora.dropout=0.1", "memory.cuda_graphs=true"], "lora.dropout = 0.1 draws another mask in every step"),
    ],
)
def test_wrong_adapters_are_refused(overrides: list[str], said: str, shop: Workshop) -> None:
    refused = shop.run("train", shop.run_file.name, *overrides)
    assert refused.code == 2 and said in " ".join(refused.shown.split())
    assert not (shop.path / "runs").exists()


def test_adapters_of_random_weights_are_refused(shop: Workshop) -> None:
    shop.run_file.write_text(RUN.replace('from = "base"', 'preset = "tiny-dense"'))
    refused = shop.run("train", shop.run_file.name)
    assert refused.code == 2 and "without model.from they would be random" in " ".join(refused.shown.split())


def test_adapters_are_no_model_to_start_from(shop: Workshop) -> None:
    (shop.path / "run").mkdir()
    (shop.path / "run" / "run.toml").write_text(RUN)
    shop.run_file.write_text(RUN.replace('"base"', '"run"'))
    refused = shop.run("train", shop.run_file.name)
    assert refused.code == 2 and "merge them with `phalanx export run FOLDER`" in " ".join(refused.shown.split())


@pytest.mark.slow
def test_a_quantized_base_goes_on_as_it_began(shop: Workshop) -> None:
    """With dropout: a run that stops and goes on has the losses of one that does not. Another format is another run."""
    shop.run_file.write_text(RUN.replace("rank = 4\n", 'rank = 4\nbase = "nf4"\ndropout = 0.1\n'))
    shop.train("--run-dir", "whole")
    shop.train("--run-dir", "half", "train.steps=3")
    shop.train("--run-dir", "half", "--change", "train.steps=6")
    losses = {name: [e.loss for e in shop.events(name) if isinstance(e, Step)] for name in ("whole", "half")}
    assert losses["half"] == losses["whole"] and len(losses["whole"]) == 6
    refused = shop.run("train", shop.run_file.name, "--run-dir", "whole", "lora.base=int8")
    assert refused.code == 2 and "lora.base" in refused.shown


@pytest.mark.slow
def test_preferences(shop: Workshop) -> None:
    """DPO with adapters, from a file of preferences to text; a model alone has no loss on preferences."""
    pairs = [{"prompt": f"the {number}", "chosen": " fox jumps", "rejected": " lazy dozen jugs"} for number in range(40)]
    (shop.path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = 'source = "preferences"\npaths = ["pairs.jsonl"]\neval_fraction = 0.2'
    shop.run_file.write_text(RUN.replace('paths = ["text"]', data).replace("[train]", '[train]\nobjective = "dpo"'))
    ended = shop.run("train", shop.run_file.name, "--run-dir", "run", "--json")
    assert ended.code == 0, ended  # it warns of padding
    steps = [event for event in shop.events("run") if isinstance(event, Step)]
    assert steps[0].loss == pytest.approx(math.log(2), rel=1e-5) and steps[-1].loss < 0.6 and steps[-1].preferred == 1.0
    assert ended.json["eval_loss"] < 0.6
    assert shop.run("generate", "run", "the 3", "--tokens", "2", "--json").json["tokens"] >= 1
    refused = shop.run("eval", "run")
    assert refused.code == 2 and "trained on preferences" in " ".join(refused.shown.split())


def test_preferences_of_random_weights_are_refused(shop: Workshop) -> None:
    (shop.path / "pairs.jsonl").write_text("")
    text = '[model]\npreset = "tiny-dense"\n[data]\nsource = "preferences"\npaths = ["pairs.jsonl"]\n'
    shop.run_file.write_text(text + '[train]\nobjective = "dpo"\nbatch = 2\nsequence_length = 32\nsteps = 2\n')
    refused = shop.run("train", shop.run_file.name)
    assert refused.code == 2 and "without model.from that would be random" in " ".join(refused.shown.split())
