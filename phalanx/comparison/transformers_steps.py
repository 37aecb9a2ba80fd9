"""transformers in the comparison: the family of the model as `phalanx export` would write it, with Phalanx's initial weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.comparison.peer_loop import PeerJob, PeerLoop, token_losses
from phalanx.models import hf_mapping
from phalanx.models.hf_mapping import Entry
from phalanx.spec import hf_config_write


class TransformersSteps:
    """`AutoModelForCausalLM` in a plain loop. Compiled as a whole, with its loss."""

    def __init__(self, job: PeerJob):
        import transformers

        self._job = job
        config = dict(hf_config_write.config(job.run.model))
        family = str(config.pop("model_type"))
        # torch's grouped kernels, which transformers takes for experts by default, and its fastest attention without masks.
        with torch.device(job.device):
            self._model: Any = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(family, **config), dtype=torch.float32, attn_implementation="sdpa"
            )
        self._fill()
        self._model.train()
        self._balance = float(getattr(self._model.config, "router_aux_loss_coef", 0.0) or 0.0)
        losses = torch.compile(self._losses, dynamic=False) if job.compile else self._losses
        self._loop = PeerLoop(job, self._model, losses)
        self.version, self.compute = transformers.__version__, job.compute
        cast = "fp32 weights" if job.compute == "fp32" else "fp32 weights, autocast to bf16"
        cast += ", experts in bf16 with fp32 master weights" if job.run.model.moe is not None and job.compute != "fp32" else ""
        self.settings = f"{family}, {cast}, {'compiled whole' if job.compile else 'not compiled'}, sdpa, logits of all tokens"

    def step(self) -> Tensor:
        return self._loop.step()

    def _losses(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = self._model(input_ids=tokens, use_cache=False)
        logits = output.logits.flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        balance = getattr(output, "aux_loss", None)
        return loss, loss if balance is None else loss + self._balance * balance

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._loop.computing():
            return token_losses(self._model(input_ids=tokens, use_cache=False).logits, targets)

    @torch.no_grad()
    def _fill(self) -> None:
        """Writes Phalanx's initial values into every parameter."""
        state: dict[str, Tensor] = self._model.state_dict()
        table = {entry.name: entry for entry in hf_mapping.table(self._job.run.model, state.keys())}
        written = set()
        for name, value in self._job.weights():
            written |= _write(table[name], value, state)
        shared = {tensor.data_ptr() for name, tensor in state.items() if name in written}
        missing = [name for name, tensor in state.items() if name not in written and tensor.data_ptr() not in shared]
        if missing:
            raise RuntimeError(f"its tensor {missing[0]} has no counterpart in Phalanx's model")


def _write(entry: Entry, value: Tensor, state: dict[str, Tensor]) -> set[str]:
    """Writes one of our tensors into those of Hugging Face; returns their names."""
    for part in entry.parts:
        ours = value if part.expert is None else value[part.expert]
        rows = state[part.hf_name].view(-1, part.width)[slice(*part.rows)]
        (rows if part.columns is None else rows[:, slice(*part.columns)]).copy_(hf_mapping.to_hf(part, ours))
    return {part.hf_name for part in entry.parts}
