"""DPO: the loss of a batch of preferences against a formula written by hand and against TRL, with adapters and without; what a step reports;
resumption; and every layout, through one pool of ranks."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
from ranks import ALONE, tiny_run, tiny_trainer
from torch import Tensor

import phalanx as px
from phalanx.evaluation.convert import export_checkpoint
from phalanx.events.records import Restored, Step
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.run import Data, Dpo, Lora, Optimizer, Run
from phalanx.training.trainer import Trainer
from phalanx.verification.cases import MODELS, random_pairs
from phalanx.verification.parity import Report, verify
from phalanx.verification.rank_pool import RankPool

PAIRS = [
    ("the quick", " brown fox jumps over the lazy dog", " dozen wizards"),
    ("pack my", " box with five", " dozen liquor jugs over the fox"),
    ("the five", " boxing wizards", " lazy jugs"),
    ("jumps over", " the lazy dog", " my box with the quick brown dog"),
]
RUN = """\
[model]
from = "{base}"
[data]
source = "preferences"
paths = ["{pairs}"]
cache = "{cache}"
eval_fraction = 0.0
[train]
objective = "dpo"
batch = 2
sequence_length = 64
steps = 8
[dpo]
beta = 0.3
[optimizer]
learning_rate = {rate}
schedule = "constant"
[cluster]
device = "cpu"
threads = 1
"""


def make(folder: Path, *overrides: str, rate: float = 0.01) -> Trainer:
    if not (folder / "base").exists():
        hf_models.save(folder / "base", "llama")
        lines = [json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) for prompt, chosen, rejected in PAIRS]
        (folder / "pairs.jsonl").write_text("\n".join(lines))
    text = RUN.format(base=folder / "base", pairs=folder / "pairs.jsonl", cache=folder / "cache", rate=rate)
    return px.trainer(loads(text, overrides=list(overrides)), checkpoints=folder / "run" / "checkpoints")


def log_probability(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Of an answer after its prompt, by transformers and the definition."""
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        rows = model(input_ids=ids).logits[0].double().log_softmax(-1)
    return sum((rows[len(prompt) + i - 1, token] for i, token in enumerate(answer)), torch.zeros((), dtype=torch.float64))


def measured(trainer: Trainer) -> float:
    """Our mean loss of all pairs."""
    batch = trainer.feed.prepare(trainer.data.train.batch(np.arange(trainer.data.train.count)))
    with trainer.stepper.evaluating():
        loss, pairs = trainer.stepper.measure(batch).tolist()
    assert pairs == len(PAIRS)
    return loss / pairs


@pytest.mark.parametrize("lora", [(), ("lora.rank=4",)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_the_paper(lora: tuple[str, ...], smoothing: float, tmp_path: Path) -> None:
    """Computed pair by pair with transformers: log-probabilities of the exported model and of the model it started from."""
    transformers = pytest.importorskip("transformers")
    trainer = make(tmp_path, f"dpo.label_smoothing={smoothing}", *lora)
    first = trainer.step()
    assert isinstance(first, Step) and first.loss == pytest.approx(math.log(2), rel=1e-5)  # nothing has moved yet
    for _ in range(3):
        trainer.step()
    trainer.save()
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000004", tmp_path / "policy")
    policy, base = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("policy", "base"))
    tokenizer = trainer.data.tokenizer
    expected = 0.0
    for prompt, chosen, rejected in PAIRS:
        before = [int(token) for token in tokenizer.encode(prompt)]
        answers = [[*(int(token) for token in tokenizer.encode(text)), tokenizer.end] for text in (chosen, rejected)]
        gains = [log_probability(policy, before, answer) - log_probability(base, before, answer) for answer in answers]
        z = 0.3 * float(gains[0] - gains[1])
        expected -= (1 - smoothing) * math.log(1 / (1 + math.exp(-z))) + smoothing * math.log(1 / (1 + math.exp(z)))
    assert abs(expected / len(PAIRS) - math.log(2)) > 0.01, "the model has not moved"
    assert measured(trainer) == pytest.approx(expected / len(PAIRS), abs=1e-5)


@pytest.mark.parametrize("lora", [(), ("lora.rank=4",)], ids=["all weights", "adapters"])
def test_the_loss_is_that_of_trl(lora: tuple[str, ...], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs trl: pip install trl")
    datasets = pytest.importorskip("datasets")
    import transformers

    trainer = make(tmp_path, *lora)
    for _ in range(4):
        trainer.step()
    trainer.save()
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000004", tmp_path / "policy")
    policy, base = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("policy", "base"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about each other
        theirs = trl.DPOTrainer(
            model=policy,
            ref_model=base,
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_list(rows),
            args=trl.DPOConfig(
                output_dir=str(tmp_path / "trl"),
                beta=0.3,
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=len(PAIRS),
                disable_dropout=True,
            ),
        )
        (batch,) = list(theirs.get_train_dataloader())
        with torch.no_grad():
            loss = float(theirs.compute_loss(policy.eval(), batch))
    assert abs(loss - math.log(2)) > 0.01, "the model has not moved"
    assert measured(trainer) == pytest.approx(loss, abs=1e-5)


def test_training_learns_the_preference_and_reports_it(tmp_path: Path) -> None:
    trainer = make(tmp_path, "lora.rank=4", rate=0.02)
    steps = [trainer.step() for _ in range(8)]
    first, last = steps[0], steps[-1]
    assert isinstance(first, Step) and isinstance(last, Step)
    assert first.reward == pytest.approx(0.0, abs=1e-6) and last.reward is not None and last.reward > 0.5
    assert last.preferred == 1.0 and last.loss < 0.4
    targets = sum(int((trainer.data.train.batch(np.array([i])).targets >= 0).sum()) for i in range(trainer.data.train.count))
    assert 0 < last.tokens <= 2 * targets


def test_a_resumed_run_compares_with_the_same_reference(tmp_path: Path) -> None:
    """Without adapters, the reference is a second model, which no checkpoint holds: it comes from `model.from` again."""
    trainer = make(tmp_path)
    for _ in range(3):
        trainer.step()
    trainer.save()
    later = [step.loss for _ in range(2) if (step := trainer.step()) is not None]
    again = make(tmp_path)
    assert isinstance(again.restore()[-1], Restored)
    resumed = [step.loss for _ in range(2) if (step := again.step()) is not None]
    assert resumed == later


def test_held_out_pairs_have_a_loss_and_no_perplexity(tmp_path: Path) -> None:
    run = preference_run("dense", {}, Lora(), data=Data(source="preferences", documents=random_pairs(0), eval_fraction=0.2))
    trainer = tiny_trainer(ALONE, run, tmp_path / "checkpoints")
    trainer.step()
    evaluated = trainer.evaluate()
    assert evaluated is not None and evaluated.perplexity is None and evaluated.tokens > 5
    assert 0 < evaluated.loss < 2 and evaluated.sources.keys() == {"preferences"}


def preference_run(model: str, layout: dict[str, Any], lora: Lora, **more: Any) -> Run:
    run = tiny_run("train.sequence_length=48")
    data = Data(source="preferences", documents=random_pairs(0), eval_fraction=0.0)
    dpo, train = Dpo(beta=0.5, label_smoothing=0.1), replace(run.train, objective="dpo")
    parts = {
        "data": data,
        "dpo": dpo,
        "train": train,
        "lora": lora,
        "model": MODELS[model],
        "layout": Layout(**({"data": 1} | layout)),
    }
    return replace(run, **(parts | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as opened:
        yield opened


def told(report: Report) -> str:
    return f"{report.failure} {[check for check in report.checks if not check.passed]}"


ROWS: dict[str, tuple[str, dict[str, Any], Lora, dict[str, Any]]] = {
    "tensor × shard, adapters": ("dense", {"tensor": 2, "shard": 2}, Lora(rank=4), {}),
    "pipeline × shard": ("gpt", {"pipeline": 2, "shard": 2}, Lora(), {}),
    "tensor × shard": ("dense", {"tensor": 2, "shard": 2}, Lora(), {}),
    "pipeline × tensor, adapters": ("gpt", {"pipeline": 2, "tensor": 2, "sequence": True}, Lora(rank=3), {}),
    "tensor × shard, quantized": ("dense", {"tensor": 2, "shard": 2}, Lora(rank=4, base="nf4", dropout=0.2), {}),
    "context": ("dense", {"context": 2, "data": 2}, Lora(), {}),
    "experts": ("moe", {"shard": 2, "zero": 1, "expert": 2}, Lora(), {}),
    "local steps": ("dense", {"data": 2}, Lora(), {"optimizer": Optimizer(sync_every=2)}),
}
QUICK = ["tensor × shard, adapters", "pipeline × shard"]


@pytest.mark.parametrize("row", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ROWS])
def test_ranks_equal_one_process(row: str, pool: RankPool) -> None:
    model, layout, lora, more = ROWS[row]
    report = verify(preference_run(model, layout, lora, **more), steps=3, pool=pool)
    assert report.passed, told(report)
