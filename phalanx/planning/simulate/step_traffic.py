"""What a step's ranks send, and over which links: from an option of the plan to the traffic that `planning/simulate/simulated_step` lets share
links. Called by the CLI."""

from __future__ import annotations

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.simulate.simulated_step import Step, Tier, Traffic, simulate_step
from phalanx.schedules.makers import make, schedule_for
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

_GRADIENT = 4
"""Bytes of a value that is summed over replicas."""
_WORK = ("compute", "launch", "tensor", "context", "expert")
"""What the times of actions hold."""


def step_of(run: Run, hardware: Hardware, option: Candidate) -> Step:
    """The option's step, simulated."""
    order = schedule_for(option.layout, option.accumulation) or make("1f1b", 1, option.accumulation)
    return simulate_step(order, option.pieces, traffic(run, hardware, option), option.split.get("other", 0.0))


def tiers(layout: Layout, hardware: Hardware) -> dict[str, Tier]:
    """The link that each dimension's messages take: ranks that are neighbours share an island as far as it goes."""
    reach = {
        "tensor": layout.tensor,
        "context": layout.tensor * layout.context,
        "expert": layout.expert * layout.expert_tensor,
        "data": layout.tensor * layout.context * layout.shard * (layout.data or 1),
        "shard": layout.tensor * layout.context * layout.shard,
        "pipeline": layout.ranks,
    }
    return {dimension: "island" if ranks <= hardware.island else "network" for dimension, ranks in reach.items()}


def traffic(run: Run, hardware: Hardware, option: Candidate) -> Traffic:
    """Messages that actions wait for come out of the plan's split; those beside actions are counted here, less what the plan shows of them."""
    layout, split, pieces = option.layout, option.split, option.pieces
    on = tiers(layout, hardware)
    work = sum(split.get(name, 0.0) for name in _WORK)
    inside = tuple(
        (name, on[name], split.get(name, 0.0) / work) for name in ("tensor", "context", "expert") if split.get(name, 0.0) > 0
    )
    values = _held(run, layout)
    whole = pieces["forward"] + pieces["input"] + pieces["weight"]
    speed = {"island": hardware.island_bandwidth, "network": hardware.network}
    size = 2 if option.compute != "fp32" else 4
    behind = last = None
    if layout.shard > 1 and layout.zero == 3:
        sent = (2 * size + _GRADIENT) * values / speed[on["shard"]]
        hidden = sent - split.get("data", 0.0) / option.accumulation
        behind = on["shard"], _part(hidden, whole)
    elif layout.replicas * layout.context > 1:
        sent = (_GRADIENT + size) * values / speed[on["data"]]
        stages = layout.stages_per_rank if layout.pipeline > 1 else 1
        last = on["data"], _part(sent - split.get("data", 0.0), (pieces["input"] + pieces["weight"]) / stages)
    return Traffic(inside=inside, hop=on["pipeline"], behind=behind, last=last)


def _part(hidden: float, beside: float) -> float:
    """Of what it runs beside: what is longer shows, and the plan has it in its split."""
    return min(1.0, max(0.0, hidden / beside)) if beside > 0 else 0.0


def _held(run: Run, layout: Layout) -> float:
    """Values that a rank computes with, before shards divide them."""
    model = run.model
    experts = 0
    if model.moe is not None:
        experts = (model.layers - model.moe.dense_layers) * model.moe.experts * 3 * model.dim * model.moe.ffn
    dense = model.parameters() - experts
    return (dense / layout.tensor + experts / (layout.expert * layout.expert_tensor)) / layout.pipeline
