"""The one-device side of a proof, against transformers and torch's own optimizer: so both sides cannot be wrong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import make
from ranks import ALONE, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.models import hf_mapping
from phalanx.optim.optimizer import learning_rate
from phalanx.spec import hf_config
from phalanx.spec.model import ModelSpec
from phalanx.verification.reference import record_steps

STEPS = 6


def ours_from(tensors: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Their tensors, weights or gradients, under our names."""
    found = {entry.name: torch.empty(entry.shape) for entry in hf_mapping.table(spec, tensors)}
    matrices = {name: tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[:, None] for name, tensor in tensors.items()}
    hf_mapping.fill(found, hf_mapping.table(spec, tensors), lambda name, first, last: matrices[name][first:last])
    return found


def their_steps(theirs: Any, trainer: Any, spec: ModelSpec) -> list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """Loss, gradients of its mean and parameters after each of the same steps, by transformers and torch.optim."""
    run = trainer.run
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    plain = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": run.optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    betas = (run.optimizer.beta1, run.optimizer.beta2)
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=run.optimizer.eps, fused=False, foreach=False)
    found = []
    for step in range(STEPS):
        batch = trainer.data.train.batch(np.arange(step * run.batch, (step + 1) * run.batch))
        optimizer.zero_grad()
        logits = theirs(input_ids=torch.from_numpy(batch.tokens)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        loss.backward()
        gradients = ours_from({name: p.grad.clone() for name, p in theirs.named_parameters()}, spec)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), run.train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optimizer, step, run.steps)
        optimizer.step()
        found.append((loss.item(), gradients, ours_from(dict(theirs.named_parameters()), spec)))
    return found


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_one_process_trains_as_transformers_and_torch_do(family: str, tmp_path: Path) -> None:
    theirs = make(family)
    theirs.config.architectures = [type(theirs).__name__]
    theirs.config.save_pretrained(tmp_path)
    spec = hf_config.model_spec(tmp_path)
    run = tiny_run("data.document_mask=false", "train.clip=0.5", f"train.steps={STEPS}", "optimizer.eps=1e-4")
    trainer = tiny_trainer(ALONE, replace(run, model=replace(spec, from_=None)), tmp_path)
    with torch.no_grad():
        for name, tensor in ours_from(theirs.state_dict(), spec).items():
            trainer.model.get_parameter(name).copy_(tensor)
    expected = their_steps(theirs, trainer, spec)
    taken = list(record_steps(trainer, STEPS))[1:]
    for moment, (loss, gradients, parameters) in zip(taken, expected, strict=True):
        assert moment.loss == pytest.approx(loss, rel=1e-5)
        assert moment.gradients.keys() == gradients.keys() == parameters.keys()
        scale = (
            float(moment.batch.split()[0]) / run.batch_tokens
        )  # ours are divided by all tokens, also those that do not count
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for name, gradient in gradients.items():
            mine = moment.gradients[name][0] / scale
            assert (mine - gradient).abs().max().item() < 1e-4 * max(gradient.abs().max().item(), 1e-2 * largest), name
    trainer.close()
    for name, parameter in expected[-1][2].items():  # moments hold live parameters: those of the end
        torch.testing.assert_close(taken[-1].parameters[name][0], parameter, rtol=1e-4, atol=1e-5)
    assert expected[-1][0] < expected[0][0]
    norms = [moment.norm for moment in taken]
    assert max(norms) > 0.5  # clipping took part
