"""The estimate of what a sequence keeps against what autograd really keeps, on the models themselves."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.models.init import build, materialize
from phalanx.planning.memory import sequence_bytes
from phalanx.spec.model import Mla, ModelSpec, Moe

DENSE = ModelSpec(vocab=16, dim=128, layers=3, heads=4, context=512)
MIXED = replace(DENSE, moe=Moe(experts=16, active=4, ffn=128))
LATENT = replace(
    DENSE, ffn=256, mla=Mla(kv_rank=32, q_rank=48, nope_dim=32, rope_dim=16, value_dim=32),
    moe=Moe(experts=16, active=4, ffn=128, shared=1, dense_layers=1, router="sigmoid", groups=4, active_groups=2),
)  # fmt: skip
MODELS = {"dense": DENSE, "experts": MIXED, "latent": LATENT}


def kept(spec: ModelSpec, compute: str, length: int) -> int:
    """Bytes that one forward of one sequence leaves for its backward."""
    model = materialize(build(spec), 0, torch.device("cpu"))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, tuple[int, Tensor]] = {}  # with the tensors, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    precision = torch.autocast("cpu", dtype=torch.bfloat16) if compute == "bf16" else nullcontext()
    with precision, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None])
    return sum(size for size, _ in held.values())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_near_what_a_forward_keeps(name: str, compute: str) -> None:
    spec = MODELS[name]
    # The difference of two lengths leaves out what does not grow with the sequence, such as casts of the weights.
    measured = kept(spec, compute, 512) - kept(spec, compute, 256)
    assert sequence_bytes(spec, 256, compute) == pytest.approx(measured, rel=0.25)


def test_modules_that_predict_ahead_are_blocks_with_logits() -> None:
    for spec in MODELS.values():
        more = replace(spec, ahead=2)
        deeper = replace(spec, layers=spec.layers + 2)
        for compute, logit in (("bf16", 16), ("fp32", 12)):
            logits = 2 * 256 * spec.rows * logit
            assert sequence_bytes(more, 256, compute) == sequence_bytes(deeper, 256, compute) + logits
