"""Traces a step of a custom module on fake tensors: what its activations take, what it computes, and whether the run's layout can cut it.
`launch/model_check` starts it, so that plans count the module as it is, and mistakes are found once, before any rank starts.

    python -m phalanx.rehearsal.module_process < QUESTION.json

It prints a JSON object on the last line: the fields of `Size`; or problems, a list of sentences. A module that cannot be traced is not
refused for that: its size has no activations then, but the reason.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, Literal

import torch

from phalanx.models.init import build
from phalanx.rehearsal.extrapolate import SampledLayers, sample_layers
from phalanx.rehearsal.fake_gpu import RehearsalDevice, card
from phalanx.rehearsal.rehearse import NeedsValues, rehearse
from phalanx.rehearsal.result import Rehearsal
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan, Size
from phalanx.spec.run import Memory, Run
from phalanx.worker.measure_process import fewest_replicas, measure, print_size

Compute = Literal["fp32", "bf16", "fp16", "fp8"]
_DEGREES = ("tensor", "shard", "context", "pipeline", "expert")
_MANY = 64
"""Sequences of the smaller of two traced micro-batches: so many that activations, not states, make the peak of a step."""


def main() -> None:
    torch.set_num_threads(1)
    print_size(lambda: answer_question(json.loads(sys.stdin.read())))


def answer_question(question: dict[str, Any]) -> Size:
    run = loads(question["run"])
    return traced(
        run, measure(run), question["compute"], RehearsalDevice(card=card(question["gpu"]) if question["gpu"] else None)
    )


def traced(run: Run, size: Size, compute: Compute, on: RehearsalDevice) -> Size:
    """The size with what a trace of the step adds. RunError if one device can compute the step but a rank of the run's layout cannot."""
    try:
        return traced_layers(run, size, compute, on, sample_layers(build(run.model)))
    except NotRepeated:
        return traced_layers(run, size, compute, on, None)


def traced_layers(run: Run, size: Size, compute: Compute, on: RehearsalDevice, layers: SampledLayers | None) -> Size:
    """`layers`: the only ones to trace. Raises NotRepeated if the others' part of the step does not follow from theirs."""

    def step(layout: Layout, sequences: int, recompute: Literal["none", "full"] = "none") -> Rehearsal:
        plan = Plan(
            layout=layout,
            device="cuda" if on.card else "cpu",
            threads=1,
            micro_batch=sequences,
            accumulation=1,
            compute=compute,
            parameters=size.parameters,
            flops_per_token=size.flops_per_token,
            peak_flops=None,
        )
        asked = replace(run, layout=layout, memory=Memory(recompute=recompute, offload="none"))
        found = rehearse(asked, plan, 0, on, layers if layout.pipeline == 1 else None)
        if found.profile is not None and found.error is None and found.profile.peaks() is None:
            raise NotRepeated
        return found

    try:
        alone = step(Layout(data=1), _MANY)
    except NeedsValues as error:
        return replace(size, untraced=error.problems[0])
    if alone.error is not None:
        return replace(size, untraced=f"On fake tensors its step fails: {alone.error}")
    layout = fewest_replicas(run.layout)
    if replace(layout, data=1).ranks > 1 and (failure := step(layout, 1).error) is not None:
        keys = [f"layout.{key} = {getattr(layout, key)}" for key in _DEGREES if getattr(layout, key) > 1]
        raise RunError(
            f"{run.model.custom_key} computes its step on one device, but not with {' and '.join(keys)}: {failure}. Its forward "
            f"must call every layer and infer the sizes that ranks share (docs/own-model.md); or set {keys[0].partition(' ')[0]} = 1."
        )
    tensor = Layout(data=1, tensor=layout.tensor, sequence=layout.sequence)
    fewer, more = (alone if tensor.ranks == 1 else step(tensor, _MANY)), step(tensor, 2 * _MANY)
    tokens = _MANY * run.train.sequence_length
    size = replace(
        size,
        traced_flops_per_token=_flops(alone) / tokens,
        rank_flops_per_token=_flops(fewer) / tokens,
        rank_parameters=_parameters(fewer),
        activations=_growth(fewer, more) / tokens,
    )
    if not size.blocks:
        return size
    some, twice = step(tensor, _MANY, "full"), step(tensor, 2 * _MANY, "full")
    return replace(size, recomputed_activations=_growth(some, twice) / tokens if twice.error is None else None)


class NotRepeated(Exception):
    """A step does not go through its layers once forward and once backward."""


def _flops(step: Rehearsal) -> int:
    return sum(step.flops.values()) if step.profile is None else step.profile.total_flops


def _parameters(step: Rehearsal) -> int:
    return step.elements if step.profile is None else step.profile.total_parameters


def _growth(fewer: Rehearsal, more: Rehearsal) -> int:
    """Bytes by which the peak grows with the number of sequences, however many there are: states, which do not grow, may be larger."""
    few, many = (None if step.profile is None else step.profile.peaks() for step in (fewer, more))
    if few is None or many is None:
        return more.peak - fewer.peak
    return max(after - before for before, after in zip(few, many, strict=True))


if __name__ == "__main__":
    main()
