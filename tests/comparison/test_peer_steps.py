"""Every peer starts from Phalanx's weights and takes the same steps: its model and loop were written by others, or apart from Phalanx's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comparison.step_jobs import LLAMA, MODELS, tiny_job, tiny_run

from phalanx.comparison.handwritten_loop import HandwrittenLoop
from phalanx.comparison.peer_loop import PeerJob
from phalanx.comparison.phalanx_steps import PhalanxSteps
from phalanx.comparison.torchtitan_steps import TorchtitanSteps
from phalanx.comparison.trainer_process import StepTrainer
from phalanx.comparison.transformers_steps import TransformersSteps
from phalanx.spec.errors import RunError
from phalanx.spec.model import PRESETS
from phalanx.spec.run import Data, Memory, Run

STEPS = 3


def assert_same_steps(job: PeerJob, peer: StepTrainer, folder: Path) -> None:
    ours = PhalanxSteps(job, folder)
    before, theirs = ours.token_losses(*job.probe), peer.token_losses(*job.probe)
    assert before.std() > 0.05, "tokens have different losses, so that equal ones mean something"
    torch.testing.assert_close(theirs, before, rtol=1e-5, atol=1e-5)
    losses = [ours.step() for _ in range(STEPS)]
    assert losses[-1] < losses[0] - 0.1, "it learns"
    assert [peer.step() for _ in range(STEPS)] == pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_takes_the_same_steps(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    job = tiny_job(tiny_run(MODELS[name]))
    assert_same_steps(job, TransformersSteps(job), tmp_path)


@pytest.mark.parametrize("name", ["llama", "tied, scaled", "qwen3"])
def test_the_hand_written_loop_takes_the_same_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.comparison.handwritten_loop._CHUNK", 50)  # the 128 tokens of a step are three chunks
    job = tiny_job(tiny_run(MODELS[name]))
    assert_same_steps(job, HandwrittenLoop(job), tmp_path)


@pytest.mark.parametrize("fsdp", [False, True])
def test_torchtitan_takes_the_same_steps(fsdp: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed", exc_type=ImportError)
    job = tiny_job()
    peer = TorchtitanSteps(job, tmp_path, fsdp=fsdp)
    try:
        assert_same_steps(job, peer, tmp_path)
    finally:
        if fsdp:
            torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of compilers are for their authors
@pytest.mark.parametrize("make", [TransformersSteps, HandwrittenLoop])
def test_compiled_peers_take_the_same_steps(make: Callable[[PeerJob], StepTrainer], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    job = tiny_job(compile=True)
    assert_same_steps(job, make(job), tmp_path)


def test_sixteen_bits_round_the_same_steps(tmp_path: Path) -> None:
    run = tiny_run()
    job = tiny_job(replace(run, precision=replace(run.precision, compute="bf16")))
    ours, peer = PhalanxSteps(job, tmp_path), HandwrittenLoop(job)
    assert peer.params[0].dtype == torch.bfloat16 and peer.masters[0].dtype == torch.float32
    assert peer.compute == ours.compute == "bf16"
    difference = (ours.token_losses(*job.probe) - peer.token_losses(*job.probe)).square().mean().sqrt()
    assert 0 < difference < 0.02
    assert [peer.step() for _ in range(STEPS)] == pytest.approx([ours.step() for _ in range(STEPS)], rel=5e-3)


def test_experts_of_transformers_are_multiplied_in_sixteen_bits(tmp_path: Path) -> None:
    """Autocast leaves torch's grouped products in fp32, where they are many times slower: a comparison with those would flatter Phalanx."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    run = tiny_run(MODELS["qwen3-moe"])
    exact, rounded = (tiny_job(replace(run, precision=replace(run.precision, compute=compute))) for compute in ("fp32", "bf16"))
    peer = TransformersSteps(rounded)
    stacked = [param for param in peer._model.parameters() if param.ndim == 3]
    assert stacked and {param.dtype for param in stacked} == {torch.bfloat16}
    before = [param.clone() for param in stacked]
    ours = PhalanxSteps(exact, tmp_path)
    losses = [float(peer.step()) for _ in range(STEPS)]
    assert losses == pytest.approx([ours.step() for _ in range(STEPS)], rel=2e-2) and losses[-1] < losses[0] - 0.1
    assert all(not torch.equal(now, then) for now, then in zip(stacked, before, strict=True))
    assert {param.dtype for param in TransformersSteps(exact)._model.parameters()} == {torch.float32}


def test_peers_read_the_tokens_of_phalanx(tmp_path: Path) -> None:
    from phalanx.training.micro_batch import BatchFeed

    job = tiny_job()
    ours = PhalanxSteps(job, tmp_path)
    trainer = ours._trainer
    feed = BatchFeed(trainer.run, trainer.plan, trainer.mesh, trainer.data)
    for step in range(STEPS):
        (batch,) = feed.next(2 * step)
        tokens, targets = job.batches[step]
        assert torch.equal(batch.tokens, tokens) and torch.equal(batch.targets, targets)
    feed.close()


def test_masks_between_documents_do_not_hide_equal_weights(tmp_path: Path) -> None:
    documents = tuple(f"document {number} ends here. " for number in range(400))
    run = tiny_run(data=Data(source="memory", documents=documents, document_mask=True, eval_fraction=0.0))
    job = tiny_job(run)
    ours, peer = PhalanxSteps(job, tmp_path), HandwrittenLoop(job)
    assert "documents masked" in ours.settings
    torch.testing.assert_close(peer.token_losses(*job.probe), ours.token_losses(*job.probe), rtol=1e-5, atol=1e-5)
    assert abs(ours.step() - peer.step()) > 1e-4, "with masks, the first step reads less"


def test_phalanx_says_what_it_runs(tmp_path: Path) -> None:
    run: Run = tiny_run(memory=Memory(loss_chunk=32, recompute="full"))
    words = PhalanxSteps(tiny_job(run), tmp_path).settings
    assert words == "fp32 weights, not compiled, loss in chunks of 32, documents not masked, full recomputation"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (MODELS["gpt2"], "RMS norms"),
        (MODELS["qwen3"], "does not normalize"),
        (MODELS["tied, scaled"], "does not tie"),
        (MODELS["qwen3-moe"], "no such blocks"),
        (replace(LLAMA, head_dim=32), "dim / heads"),
        (replace(LLAMA, rope_scaling=PRESETS["deepseek-v3"].rope_scaling), "YaRN"),
    ],
)
def test_peers_refuse_what_they_cannot_compute(model: object, why: str, tmp_path: Path) -> None:
    job = tiny_job(tiny_run(model))  # type: ignore[arg-type]
    with pytest.raises(RunError, match=why):
        TorchtitanSteps(job, tmp_path, fsdp=False)
    if model not in (MODELS["qwen3"], MODELS["tied, scaled"]) and why != "dim / heads":
        with pytest.raises(RunError, match="no hand-written loop for this architecture"):
            HandwrittenLoop(job)
