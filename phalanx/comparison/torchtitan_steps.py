"""torchtitan in the comparison: its Llama 3 with Phalanx's initial weights, each block compiled as torchtitan's own trainer does.

Written for torchtitan 0.2. Its model is imported where it is used, so that a missing or changed package is a reason in the table.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import accelerator
from phalanx.comparison.peer_loop import PeerJob, PeerLoop, token_losses
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

_NAMES = {
    "embed": "tok_embeddings",
    "attention.query": "attention.wq",
    "attention.key": "attention.wk",
    "attention.value": "attention.wv",
    "attention.output": "attention.wo",
    "attention_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.down": "feed_forward.w2",
    "mlp.up": "feed_forward.w3",
    "norm": "norm",
    "head": "output",
}
"""Our name of a module, without its block, to torchtitan's."""


class TorchtitanSteps:
    """torchtitan's Llama 3, under autocast or as FSDP2 on one rank, which casts weights itself."""

    def __init__(self, job: PeerJob, folder: Path, *, fsdp: bool):
        spec = job.run.model
        if (why := _unsupported(spec)) is not None:
            raise RunError(f"torchtitan's Llama 3 {why}")
        from torchtitan.models.llama3 import Transformer

        with torch.device(job.device):
            self._model: Any = Transformer(_arguments(spec, job.run.train.sequence_length))
        with torch.no_grad():
            params = dict(self._model.named_parameters())
            for name, value in job.weights():
                params[_their_name(name)].copy_(_interleaved(name, value, spec))
        self._loss = torch.compile(_summed) if job.compile else _summed
        if job.compile:
            for name, block in list(self._model.layers.named_children()):
                self._model.layers.register_module(name, torch.compile(block, fullgraph=True))
        if fsdp:
            _shard(self._model, job, folder)
        self._loop = PeerLoop(job, self._model, self._losses, autocast=not fsdp)
        self.version, self.compute = version("torchtitan"), job.compute
        cast = "" if job.compute == "fp32" else ", FSDP2 casts to bf16" if fsdp else ", autocast to bf16"
        words = f"Llama 3, fp32 weights{cast}{' (FSDP2 on one rank)' if fsdp and not cast else ''}"
        self.settings = f"{words}, {'blocks compiled' if job.compile else 'not compiled'}, logits of all tokens"

    def step(self) -> Tensor:
        return self._loop.step()

    def _losses(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = self._loss(self._model(tokens), targets) / (targets >= 0).sum()
        return loss, loss

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._loop.computing(), torch.compiler.set_stance("force_eager"):
            return token_losses(self._model(tokens), targets)


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def _unsupported(spec: ModelSpec) -> str | None:
    """Why torchtitan's Llama 3 cannot express a model; None if it can."""
    rules = {
        "has no such blocks": not spec.is_builtin or spec.mla is not None or spec.moe is not None or spec.mtp_depth > 0,
        "has RMS norms, SwiGLU, rotary positions and no biases": (
            spec.norm,
            spec.activation,
            spec.positions,
            spec.bias,
        )
        != ("rms", "swiglu", "rope", False),
        "does not normalize queries and keys": spec.qk_norm,
        f"has no {' and '.join(spec.variations)}": bool(spec.variations),
        "does not tie embedding and head": spec.tied,
        "has heads of dim / heads": spec.head * spec.heads != spec.dim,
        "does not scale rotary frequencies by YaRN": spec.rope_scaling is not None and spec.rope_scaling.kind != "llama3",
    }
    return next((why for why, applies in rules.items() if applies), None)


def _arguments(spec: ModelSpec, sequence: int) -> Any:
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    scaling = spec.rope_scaling
    # torchtitan always scales: by 1 where the model does not.
    rope = RoPEScalingArgs(scaling_factor=1.0)
    if scaling is not None:
        rope = RoPEScalingArgs(scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context)
    usual = int(2 * 4 * spec.dim / 3)
    return TransformerModelArgs(
        dim=spec.dim,
        n_layers=spec.layers,
        n_heads=spec.heads,
        n_kv_heads=spec.kv,
        vocab_size=spec.rows,
        multiple_of=1,
        ffn_dim_multiplier=(spec.hidden + 0.5) / usual,  # it rounds down
        norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling_args=rope,
        max_seq_len=sequence,
    )


def _their_name(name: str) -> str:
    found = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.weight", name)
    assert found is not None, name
    block = "" if found[1] is None else f"layers.{found[1]}."
    return f"{block}{_NAMES[found[2]]}.weight"


def _interleaved(name: str, value: Tensor, spec: ModelSpec) -> Tensor:
    """torchtitan rotates neighboring channels of a head, Phalanx channel i with channel i + half: the rows change places."""
    if not name.endswith(("attention.query.weight", "attention.key.weight")):
        return value
    return value.view(-1, 2, spec.head // 2, spec.dim).transpose(1, 2).reshape(value.shape)


def _shard(model: Any, job: PeerJob, folder: Path) -> None:
    """Each block and the whole under FSDP2, with one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = accelerator.of(job.device)
    dist.init_process_group(kind.backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    options: dict[str, Any] = {"mesh": init_device_mesh(job.device.type, (1,))}
    if job.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
