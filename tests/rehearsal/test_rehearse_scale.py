"""One rank of jobs of thousands: what it sends is what the layout's formulas say, written here from scratch; in a minute, on one core,
in little memory."""

from __future__ import annotations

import resource
import time

import pytest

from phalanx.rehearsal.fake_gpu import CARDS, RehearsalDevice
from phalanx.rehearsal.rehearse import rehearse
from phalanx.rehearsal.result import Rehearsal
from phalanx.schedules.makers import make
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

LLAMA = """
model = "llama3-405b"
[data]
document_mask = false
[train]
batch = 2048
micro_batch = 1
sequence_length = 8192
steps = 10
"""
DEEPSEEK = """
model = "deepseek-v3"
[data]
document_mask = false
[train]
batch = 15360
micro_batch = 1
sequence_length = 4096
steps = 10
"""


def plan_of(run: Run, layout: Layout) -> Plan:
    return Plan(
        layout=layout,
        device="cuda",
        threads=1,
        micro_batch=1,
        accumulation=run.batch // layout.replicas,
        compute="bf16",
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )


def rehearsed(run: Run, layout: Layout, rank: int) -> Rehearsal:
    began = time.process_time()
    told = rehearse(run, plan_of(run, layout), rank, RehearsalDevice(card=CARDS["h100"], capacity=80 << 30))
    assert time.process_time() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB
    assert told.error is None
    return told


def llama_bytes(run: Run, layout: Layout, blocks: int, stages: int) -> dict[str, dict[str, int]]:
    """Of a rank between the first and the last stage."""
    model, n, shard, replicas = run.model, layout.tensor, layout.shard, layout.data or 1
    times, tokens, dim = run.batch // layout.replicas, run.train.sequence_length, model.dim
    # Attention and feed-forward gather what they read and scatter what they give; their backwards do the same the other way round.
    sliced = 4 * blocks * times * (n - 1) * (tokens // n) * dim * 2
    norms = 2 * dim * blocks
    matrices = blocks * (2 * dim * dim // n + 2 * dim * model.kv * model.head // n + 3 * dim * model.hidden // n)
    norm_sums = 2 * (n - 1) * 4 * (norms // shard) // n
    wire = 4 * (matrices + norms)
    return {
        "tensor": {"all-gather": sliced, "reduce-scatter": sliced, "all-reduce": norm_sums},
        "pipeline": {"send": 2 * stages * times * (tokens // n) * dim * 2},
        "shard": {
            "reduce-scatter": wire * (shard - 1) // shard,
            "all-gather": (2 * matrices + 4 * norms) * (shard - 1) // shard,
        },
        "data": {"all-reduce": 2 * (replicas - 1) * (wire // shard) // replicas},
    }


def test_eight_blocks_among_sixteen_thousand_ranks_send_what_formulas_say() -> None:
    """A few micro-batches of the whole job; the whole is below."""
    run = loads(LLAMA, overrides=("train.batch=256", "train.sequence_length=1024"))
    layout = Layout(data=8, shard=16, zero=1, tensor=8, sequence=True, pipeline=16, schedule="1f1b")
    told = rehearsed(run, layout, 5000)
    wanted = llama_bytes(run, layout, 8, 1)
    assert {use: told.sent[use] for use in wanted} == wanted
    assert told.sent.keys() - wanted.keys() == {"agreement"}
    assert {one.tier for one in told.messages if one.use == "tensor"} == {"node"}


@pytest.mark.slow
def test_llama_on_sixteen_thousand_ranks() -> None:
    run = loads(LLAMA)
    layout = Layout(data=8, shard=16, zero=1, tensor=8, sequence=True, pipeline=16, schedule="interleaved-1f1b")
    told = rehearsed(run, layout, 5000)
    wanted = llama_bytes(run, layout, 8, 2)
    assert {use: told.sent[use] for use in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_deepseek_on_two_thousand_ranks(recompute: str) -> None:
    run = loads(DEEPSEEK, overrides=(f"memory.recompute={recompute}",))
    layout = Layout(data=1, shard=128, zero=1, pipeline=16, expert=64, schedule="dualpipev")
    told = rehearsed(run, layout, 640)
    model, moe, times = run.model, run.model.moe, 120
    assert moe is not None and told.taken < told.micro_batches == times
    blocks, tokens = 4, run.train.sequence_length
    assert told.applied["pipeline"].endswith("stage 5: blocks 8+9, stage 26: blocks 50+51")
    actions = [action.kind for action in make("dualpipev", 16, times).actions[5]]
    # Rows go to experts with a scale each, and come back, in a forward and in a backward; each forward begins with a count for every
    # expert. A block that recomputes sends rows to experts once more, and in each half of a backward that is taken in halves.
    forwards, backwards = actions.count("F"), actions.count("B") + actions.count("I")
    again = backwards + actions.count("W") if recompute == "full" else 0
    tokens_sent = 63 * (tokens * moe.active // 64)
    there, back = tokens_sent * (model.dim * 2 + 4), tokens_sent * model.dim * 2
    counts = 63 * (moe.experts // 64) * 8
    sent = (forwards + backwards) * (there + back) + again * there + (forwards + again) * counts
    assert told.sent["expert"] == {"all-to-all": 2 * sent}
    assert told.sent["pipeline"] == {"send": 2 * (2 * times) * tokens * model.dim * 2}
    experts = blocks * 4 * 3 * moe.ffn * model.dim
    assert layout.expert_shard == 2
    assert told.sent["experts' shard"] == {"reduce-scatter": experts * 4 // 2, "all-gather": experts * 2 // 2}
