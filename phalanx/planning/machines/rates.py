"""The constants of the equations: how much of a vendor's figures real programs reach, what a launch costs, how much is hidden.

They are fitted to published steps (`make planner-fit` writes catalogue/constants.toml) by device family and number format; what was
measured on a machine wins. `planning/cost/step_time` reads them, searches get theirs by `rates_for`.
"""

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
    """Numbers, or columns beside those of `planning/cost/job_table`."""

    gemm: Column = 0.72
    """Part of the peak that a very large matrix product reaches."""
    knee: Column = 160.0
    """A product M x N x K takes 1 + knee · (1/M + 1/N + 1/K) as long."""
    attention: Column = 0.5
    """Part of the 16-bit peak that attention reaches going forward, causal blocks skipped."""
    attention_backward: Column = 0.8
    """Its backward pass, as part of that."""
    narrow: Column = 0.3
    """Heads of less than 128 reach so a power of their part of that."""
    memory: Column = 0.8
    """Part of the memory bandwidth that elementwise work reaches."""
    traffic: Column = 1.0
    """Elementwise bytes, times what the equations count; less where kernels are fused."""
    fused: Column = 0.6
    """Part of those bytes that is left when the model is compiled."""
    rounding: Column = 15.0
    """Bytes of traffic per value that is rounded to 8 bits in passes of their own, a third of them going forward."""
    fused_rounding: Column = 0.2
    """Part of them that is left where blocks are compiled: as a hand-written loop with PyTorch 2.11 has them on an H200 (1.5 and 4.5 B
    parameters take 0.83 and 0.72 times as long in fp8 as in bf16)."""
    scores: Column = 12.0
    """Bytes of traffic per attention score and pass, where the table of scores leaves the chip."""
    reread: Column = 1.0
    """Part of a block's memory-bound work that "selective" recomputation repeats …"""
    selective: Column = 0.0
    """… and of attention's forward pass."""
    repeated: Column = 1.0
    """Part of a block's forward pass that "full" recomputation repeats."""
    launch: Column = 6e-6
    """Seconds of the host per kernel."""
    staged: Column = 1.0
    """Times as many seconds where blocks are stages of a pipeline."""
    kernels: Column = 30.0
    """Kernels of a dense block, going forward; backward twice that."""
    drain: Column = 0.0
    """Seconds of the device per kernel, in which it fills and empties."""
    expert_kernels: Column = 40.0
    """Those that a block with experts has besides."""
    expert_wait: Column = 0.0
    """Seconds in which the device waits in a block with experts, each way, for the host to learn how many tokens each one gets."""
    eight: Column = 1.0
    """Above 0: routed experts multiply in 8 bits too, where the rest does."""
    copies: Column = 8.0
    """Times that a token's copy for an expert is read or written on its way there and back."""
    gather_host: Column = 1.5e-4
    """Seconds of the host per block whose parameters are gathered, each time."""
    island: Column = 0.80
    """Part of the fast links' bandwidth that collectives reach …"""
    bus: Column = 1.0
    """… the part of that which is left where devices share a bus …"""
    network: Column = 0.83
    """… and of the network's."""
    latency: Column = 1.5e-5
    """Seconds of a collective, besides its bytes …"""
    far_latency: Column = 4e-6
    """… and for each further island."""
    tensor_hidden: Column = 0.4
    """Part of each communication that computing covers."""
    context_hidden: Column = 0.7
    expert_hidden: Column = 0.2
    paired: Column = 0.0
    """The part of what is left of it that a schedule covers which was made for that: one micro-batch forward beside another's back. None
    in Phalanx, whose executor does the one after the other."""
    data_hidden: Column = 0.65
    """Part of the computing that gradients and gathered parameters can travel behind …"""
    contention: Column = 0.2
    """… while slowing it down by this part of what travels, …"""
    gathering: Column = 0.2
    """… or this one, where parameters are gathered for every micro-batch."""
    split: Column = 0.0
    """1: tensor ranks share the messages between pipeline stages even where they do not share the sequence."""
    adding: Column = 8.0
    """Bytes' worth of time to add a gradient's value to the sum of those before it."""
    optimizer_bytes: Column = 28.0
    """Bytes read and written for each value that a rank updates."""
    spread: Column = 0.0017
    """Waiting for the slowest, for each doubling of ranks beyond eight."""
    slack: Column = 1.0
    """Where layers do not divide evenly: the part of those missing that the last stage, which has the head, is spared."""
    balanced: Column = 0.0
    """1: stages are cut by cost, so that all of them share the head's."""
    overhead: Column = 0.0
    """Seconds of each step that no equation names."""
    software: Column = 1.0
    """How much longer everything takes with this software."""
    low: Column = 0.8
    """P10 of the time of a step that only computes, as part of the median …"""
    high: Column = 1.25
    """… and P90."""
    doubt: Column = 1.0
    """How many times as far off the logarithm is on devices that few have published about."""


PAIRED = 0.75
"""The same in programs that overlap the two, as DeepSeek's does. No row of the published tells; set with DeepSeek-V3's hours in view."""
OWN = {"h100": {"attention": 0.6}}
"""What this program reaches by family, where it was measured: attention by cuDNN on an H200 (`phalanx bench`: 0.56 to 0.63 with 4,096 to
16,384 tokens). Published steps are of many kernels, older ones too."""
LAUNCH = 3.3e-5
"""Seconds of the host per kernel where this program launches them by itself, beside an H200 (`phalanx bench`). Published steps are of other
programs, most of which leave that to a graph or to larger kernels, and next to none of them waits for its host."""
STAGED = 1.3
"""As measured between two CPU ranks with small blocks, where launching is all that counts: 1.22 with 1f1b, 1.29 with zbv, 1.4 with
interleaved-zero-bubble."""
NAMES = tuple(field.name for field in fields(Rates))


def rates_for(hardware: Hardware, compute: str, *, moe: bool = False) -> Rates:
    """Constants of a planned run: of its device family and number format, unless this machine has measured ones."""
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
def constants() -> dict[str, Any]:
    """What the fit has written."""
    path = files("phalanx.planning") / "catalogue" / "constants.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
