"""The constants of the time model: what fraction of a vendor's figures programs reach, what a kernel launch costs, how much
communication is hidden. They are fitted to published steps by device family and number format (`make planner-fit` writes
catalogue/constants.toml); values measured on a machine override them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.planning.machines.cluster import Hardware

Column = Any
"""A Python number or a numpy array; booleans and codes are integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Numbers, or columns that broadcast with those of `cost/job_table`."""

    gemm: Column = 0.72
    """Fraction of the peak that a very large matrix product reaches."""
    knee: Column = 160.0
    """A product M x N x K takes 1 + knee · (1/M + 1/N + 1/K) times as long."""
    attention: Column = 0.5
    """Fraction of the 16-bit peak that attention reaches in the forward, with causal blocks skipped."""
    attention_backward: Column = 0.8
    """Fraction of that which the backward reaches."""
    narrow: Column = 0.3
    """Exponent of the slowdown of heads narrower than 128."""
    memory: Column = 0.8
    """Fraction of the memory bandwidth that elementwise work reaches."""
    traffic: Column = 1.0
    """Factor on the elementwise bytes that the equations count; lower where kernels are fused."""
    fused: Column = 0.6
    """Fraction of those bytes that is left when the model is compiled."""
    rounding: Column = 15.0
    """Bytes of traffic per value rounded to fp8 in separate passes, a third of them in the forward."""
    fused_rounding: Column = 0.2
    """Fraction of those bytes that is left in compiled blocks, from a hand-written loop with PyTorch 2.11 on an H200 (1.5
    and 4.5 B parameters take 0.83 and 0.72 times as long in fp8 as in bf16)."""
    scores: Column = 12.0
    """Bytes of traffic per attention score and pass, where the table of scores leaves the chip."""
    reread: Column = 1.0
    """Fraction of a block's memory-bound work that selective recomputation repeats."""
    selective: Column = 0.0
    """Fraction of attention's forward that selective recomputation repeats."""
    repeated: Column = 1.0
    """Fraction of a block's forward that full recomputation repeats."""
    launch: Column = 6e-6
    """Host seconds per kernel."""
    staged: Column = 1.0
    """Factor on that where blocks are stages of a pipeline."""
    kernels: Column = 30.0
    """Kernels of a dense block's forward; the backward has twice as many."""
    drain: Column = 0.0
    """Device seconds per kernel to fill and drain."""
    expert_kernels: Column = 40.0
    """Additional kernels of a block with experts."""
    expert_wait: Column = 0.0
    """Seconds that the device waits in a block with experts, in each direction, until the host knows how many tokens each
    expert gets."""
    eight: Column = 1.0
    """Above 0: routed experts multiply in fp8 too, where the rest does."""
    copies: Column = 8.0
    """Times that a token's copy for an expert is read or written on its way there and back."""
    gather_host: Column = 1.5e-4
    """Host seconds per block whose parameters are gathered, each time."""
    island: Column = 0.80
    """Fraction of the fast links' bandwidth that collectives reach."""
    bus: Column = 1.0
    """Fraction of that which is left where devices share a bus."""
    network: Column = 0.83
    """Fraction of the network's bandwidth that collectives reach."""
    latency: Column = 1.5e-5
    """Seconds of a collective besides its bytes."""
    far_latency: Column = 4e-6
    """The same for each further island."""
    tensor_hidden: Column = 0.4
    """Fraction of the communication that computing hides, by dimension."""
    context_hidden: Column = 0.7
    expert_hidden: Column = 0.2
    paired: Column = 0.9
    """Fraction of the remaining expert communication that is hidden where one micro-batch's forward runs next to another's backward: all but
    what the longer of the two sends last."""
    resent: Column = 0.5
    """Part of a forward's expert communication that selective recomputation repeats: tokens are sent to their experts again."""
    splits: Column = 0.0
    """Fraction of a weight backward that schedules can defer in selectively recomputed and compiled blocks. 0 in Phalanx."""
    data_hidden: Column = 0.65
    """Fraction of the computing that can hide gradients and gathered parameters."""
    contention: Column = 0.2
    """Slowdown of computing by hidden communication, as a fraction of it."""
    gathering: Column = 0.2
    """The same where parameters are gathered for every micro-batch."""
    split: Column = 0.0
    """1: tensor ranks share the messages between pipeline stages even without sequence parallelism."""
    adding: Column = 8.0
    """Bytes of traffic to add a gradient value to the accumulated sum."""
    logits: Column = 6.0
    """Bytes of traffic per logit and direction of a step, in the loss."""
    optimizer_bytes: Column = 28.0
    """Bytes read and written per parameter that a rank updates."""
    spread: Column = 0.0017
    """Straggler time for each doubling of ranks beyond eight."""
    slack: Column = 1.0
    """If layers do not divide evenly: the fraction of the missing layers that are missing in the last stage, which has the head."""
    balanced: Column = 0.0
    """1: stages are split by cost, so that all of them share the head's time."""
    overhead: Column = 0.0
    """Seconds of each step that no equation names."""
    software: Column = 1.0
    """Factor on everything for this software."""
    low: Column = 0.8
    """P10 of a step that only computes, relative to the median."""
    high: Column = 1.25
    """P90 of a step that only computes, relative to the median."""
    doubt: Column = 1.0
    """Factor on the logarithmic uncertainty for devices with few published steps."""


OWN = {
    "h100": {
        "gemm": 0.735,
        "knee": 20.0,
        "attention": 0.53,
        "attention_backward": 0.77,
        "narrow": 0.4,
        "memory": 0.84,
        "traffic": 2.6,
        "fused": 0.35,
        "drain": 2.5e-6,
        "logits": 2.4,
        "copies": 1.6,
        "expert_wait": 0.0,
        "optimizer_bytes": 33.0,
        "overhead": 0.003,
    }
}
"""What this program reaches by family where it was measured: steps of 124M to 8B parameters on an H200, by kernel (docs/log.md, "The step on one
H200"). Published steps are of other programs: older attention kernels, losses that pass over the logits several times, hosts that wait for
the number of tokens of each expert."""
LAUNCH = 3.5e-5
"""Host seconds per kernel where this program launches kernels one by one, on an H200 (`phalanx bench`). Published steps are
of other programs, most of which use CUDA graphs or larger kernels and hardly ever wait for the host."""
STAGED = 1.3
"""`staged`, measured between two CPU ranks with small blocks, where launching dominates: 1.22 with 1f1b, 1.29 with zbv, 1.4
with interleaved-zero-bubble."""
NAMES = tuple(field.name for field in fields(Rates))


def rates_for(hardware: Hardware, compute: str, *, moe: bool = False) -> Rates:
    """Constants of a planned run: by device family and number format, overridden by what was measured on this machine."""
    table = constants()
    values: dict[str, float] = {}
    if hardware.family != "cpu":  # cores are nothing like what was published, and bring all constants of their own
        family = table.get("family", {}).get(hardware.family, {})
        key = compute if compute in table.get("format", {}) else "bf16"
        values.update(table.get("common", {}))
        values.update(table.get("format", {}).get(key, {}))
        values.update(family.get(key, {}))
        doubts = table.get("doubt", {})
        values["doubt"] = doubts.get(hardware.family, doubts.get("other", 1.0))
        for name, factor in table.get("times", {}).get(hardware.gpu.key, {}).items():
            values[name] = values[name] * factor
        if hardware.device == "cuda" and "launch" in values:
            values["expert_kernels"] *= values["launch"] / LAUNCH  # counted in the launches of those published
            values |= {"launch": LAUNCH, "staged": STAGED, "eight": 0.0, **OWN.get(hardware.family, {})}
    values.update(table.get("moe" if moe else "dense", {}))
    own = dict(hardware.measured)
    if compute == "fp8" and "bf16.attention" in own:
        own["attention"] = own["bf16.attention"]  # which stays in 16 bits
    own |= {name.removeprefix(f"{compute}."): value for name, value in own.items() if name.startswith(f"{compute}.")}
    values.update(own)
    if "gemm" in own:
        values["doubt"] = 1.0
    if "island" in own:
        values["bus"] = 1.0  # what was measured was the bus
    return Rates(**{name: value for name, value in values.items() if name in NAMES})


@cache
def constants(name: str = "constants") -> dict[str, Any]:
    """The fitted constants; "cpu": those of CPU cores."""
    path = files("phalanx.planning") / "catalogue" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
