"""The layouts of published steps: the degrees that rows print, and rules for missing values. `steps` calls it."""

from __future__ import annotations

import re
from typing import Any

from phalanx.planning.cost.job_table import RECOMPUTE, SCHEDULES

Row = dict[str, str]

TOKENS = 4e6
"""Tokens of a step whose batch is not published."""


def stack_of(row: Row) -> str:
    """The software stack of a row."""
    where, how = row["source"].lower(), f"{row['zero_or_fsdp']} {row['schedule']}".lower()
    if "TPU" in row["gpu"]:
        return "tpu"
    if re.search(r"maxtext|\bjax|\bpax|levanter|easydel", f"{where} {row['notes']} {row['model_name']}".lower()):
        return "jax"
    if "deepspeed" in how or re.search(r"deepspeed|bigscience", where):
        return "deepspeed"
    if "nanotron" in where or "picotron" in where:
        return "nanotron"
    if re.search(r"fsdp|torchtitan|torchtune|foundry|axolotl|olmo", where) or re.match(r"fsdp|hsdp", how):
        return "fsdp" if not re.search(r"nvidia|megatron|nemo|moe parallel folding", where) else "megatron"
    return "megatron"


def sharding(row: Row, stack: str, replicas: float) -> tuple[int, float]:
    """(ZeRO stage, shard degree): from "FSDP", "ZeRO-1", "distributed optimizer", "HSDP shard 128" and the like."""
    text = row["zero_or_fsdp"].lower()
    if "shard_grad_op" in text or "zero-2" in text:
        return 2, replicas
    if re.search(r"fsdp|hsdp|zero-3|full.shard", text) or (not text and stack in ("jax", "tpu")):
        said = re.search(r"(?:hsdp shard |fsdp |x fsdp)(\d+)", text)
        inside = float(said[1]) if said else replicas
        inside = min(inside if inside > 0 else replicas, replicas)
        return 3, inside if replicas % inside == 0 else replicas
    if re.search(r"zero-1|distributed optimizer|zero-1-like", text) or (not text and int(row["year"]) > 2022):
        return 1, replicas
    return 1, 1.0


def degrees(row: Row) -> dict[str, float]:
    """The printed degrees; 1 if missing."""
    return {
        "tensor": float(row["tp"] or 1),
        "context": float(row["cp"] or 1),
        "pipeline": float(row["pp"] or 1),
        "expert": float(row["ep"] or 1),
    }


def schedule(row: Row, work: dict[str, Any], assumed: list[str]) -> tuple[int, float]:
    """(index of the schedule, stages per rank)."""
    text, layers, pipeline, work_stack = row["schedule"].lower(), work["layers"], work["pipeline"], work["stack"]
    if pipeline <= 1:
        return SCHEDULES.index("1f1b"), 1.0
    if "zb-v" in text:
        return SCHEDULES.index("zbv"), 2.0
    if "dualpipe" in text:
        return SCHEDULES.index("dualpipev"), 2.0
    if "zb-2p" in text:
        return SCHEDULES.index("zbv"), 1.0
    if "zb" in text or "zero-bubble" in text:
        return SCHEDULES.index("interleaved-zero-bubble"), 1.0
    stages = float(row["vpp"] or 0)
    if "interleaved" in text and not stages:
        stages = max(1.0, -(-layers // pipeline)) if "one layer per chunk" in text else 2.0
        assumed.append("two virtual stages, or one layer in each")
    if not text and not stages:
        stages = 1.0
        if work_stack == "megatron" and int(row["year"]) >= 2023 and layers % pipeline == 0:
            # Tuned Megatron pipelines are interleaved.
            stages = max(count for count in range(1, 9) if (layers // pipeline) % count == 0)
        assumed.append("interleaved stages with Megatron since 2023, else 1F1B")
    most = max(1.0, -(-layers // pipeline))
    stages = min(stages, most) if stages > 1 else 1.0
    return SCHEDULES.index("interleaved-1f1b" if stages > 1 else "1f1b"), stages


def recipe(row: Row) -> str:
    """ "nemo" if the vendor of the device tuned the settings (NeMo and tools built on it), otherwise "plain"."""
    return "nemo" if re.search(r"nemo|megatron-bridge|dgxc", row["source"].lower()) else "plain"


def routing(row: Row) -> str:
    """The routing of tokens to experts: with dropped tokens or CUDA graphs the device does not wait for the host."""
    said = f"{row['model_name']} {row['notes']}".lower()
    if re.search(r"token.?drop|capacity", said):
        return "dropping"
    return "graphs" if "cuda graph" in said and ("on gb" not in said or "GB" in row["gpu"]) else "dropless"


def dispatch(row: Row) -> str:
    return "fast" if re.search(r"deepep|hybridep|a2a overlap", row["notes"].lower()) else "plain"


def sequence_parallel(row: Row, stack: str, tensor: float, assumed: list[str]) -> int:
    said = row["sequence_parallel"].lower()
    if said:
        return int(said.startswith("yes"))
    if tensor <= 1:
        return 0
    assumed.append("sequence parallelism with tensor parallelism since 2023")
    return int(int(row["year"]) >= 2023 and stack != "deepspeed")


def expert_tensor(row: Row, work: dict[str, Any], assumed: list[str]) -> float:
    """Experts are tensor-parallel only if they would not fit otherwise; since 2024 they seldom are."""
    if not work["experts"] or work["tensor"] <= 1:
        return 1.0
    values = work["sparse_layers"] * 3 * work["dim"] * work["expert_ffn"] * work["experts"] / work["expert"] / work["pipeline"]
    assumed.append("experts cut by the tensor group only where they must be")
    return work["tensor"] if work["zero"] < 3 and 6 * values > 0.9 * work["memory"] else 1.0


def batch_and_micro(row: Row, replicas: float, work: dict[str, Any], assumed: list[str]) -> tuple[float, float]:
    """Sequences of a step and of a micro-batch; if missing, the largest power of two up to 8 that fits without recomputation."""
    sequence, row_stack = work["sequence"], work["stack"]
    batch = float(row["global_batch_seqs"] or 0)
    micro = float(row["micro_batch"] or 0)
    steps = re.search(r"(?:grad accum|gas) (\d+)", row["schedule"].lower())
    if not batch:
        batch = max(1.0, round(TOKENS / sequence / (replicas * (micro or 1)))) * replicas * (micro or 1)
        assumed.append("a batch of 4M tokens")
    each = max(batch / replicas, 1e-9)
    if not micro and steps:
        micro = each / float(steps[1])
    if row_stack in ("jax", "tpu"):
        return batch, each  # a micro-batch is per device, without accumulation
    if not micro and work["zero"] == 3:
        most = max(1.0, 16384 / sequence)
        micro = max(
            (each / count for count in range(1, int(each) + 1) if each % count == 0 and each / count <= most), default=each
        )
        while (
            micro >= 2
            and state_bytes(work, sequence, micro) + activation_bytes(work, sequence, micro, 1.0) / 2 > work["memory"]
        ):
            micro /= 2  # rather than recompute more than half of the blocks
        assumed.append("16k tokens a micro-batch with sharded parameters")
    if not micro:
        micro = 1.0
        pipelined = work["pipeline"] > 1
        while (
            not pipelined
            and micro < 8
            and each % (2 * micro) == 0
            and state_bytes(work, sequence, 2 * micro) + activation_bytes(work, sequence, 2 * micro, each / micro / 2)
            < 0.85 * work["memory"]
        ):
            micro *= 2
        assumed.append("the micro-batch that fits")
    return batch, min(micro, each)


def state_bytes(work: dict[str, Any], sequence: float, micro: float) -> float:
    """Approximate bytes of parameters, gradients, optimizer states, and the logits of a micro-batch."""
    sparse = work.get("sparse_layers", 0.0)
    matrices = 2 + work["gated"]
    dense = work["layers"] * work["attention_weights"] + (work["layers"] - sparse) * matrices * work["dim"] * work["ffn"]
    dense += 2 * work["vocab"] * work["dim"]
    experts = (
        sparse
        * 3
        * work["dim"]
        * (work.get("expert_ffn", 0.0) * work.get("experts", 0.0))
        / (work["expert"] * work["expert_tensor"])
    )
    mine = dense / work["tensor"] / work["pipeline"]
    routed = experts / work["pipeline"]
    same = max(1.0, work["ranks"] / work["pipeline"] / work["expert"])
    third = work["zero"] == 3
    if third:
        states = 16 * mine / work["shard"] + 16 * routed / min(same, work["shard"] * work["tensor"])
    else:
        shared = work["shard"] > 1
        states = mine * (6 + 12 / (work["shard"] * work["context"] if shared else 1)) + routed * (
            6 + 12 / (same if shared else 1)
        )
    return float(states + micro * sequence / work["context"] * work["vocab"] / work["tensor"] * 6)


def activation_bytes(work: dict[str, Any], sequence: float, micro: float, count: float) -> float:
    """Approximate bytes of activations without recomputation."""
    tokens = micro * sequence / work["context"]
    sparse = work.get("sparse_layers", 0.0) / work["layers"]
    outside = 8 * work["dim"] / (work["tensor"] if work["sequence_parallel"] else 1)
    inside = 2 * (2 * work["score_width"] + work["kv_width"]) / work["tensor"]
    ffn = (1 - sparse) * (6 if work["gated"] else 4) * work["ffn"] / work["tensor"]
    routed = sparse * (
        work.get("active", 0.0) * (2 * work["dim"] + 6 * work.get("expert_ffn", 0.0)) + 6 * work.get("shared_ffn", 0.0)
    )
    scores = 5 * work["heads"] * sequence / work["tensor"] if work["scores"] else 0.0
    layers = work["layers"] / work["pipeline"]
    ranks, stages = work["pipeline"], work["stages"]
    flying = min(count, ranks) if stages <= 1 else min(count, ranks * (1 + (ranks - 1) / (ranks * stages)))
    return float(tokens * (outside + inside + ffn + routed / work["tensor"] + scores) * layers * max(flying, 1.0))


def recompute(row: Row, work: dict[str, Any], assumed: list[str]) -> tuple[int, float]:
    """(mode, fraction of the blocks): as printed; otherwise as many blocks as do not fit, because published runs did fit."""
    mode, sequence = row["recompute"].lower(), work["sequence"]
    if mode == "selective" and work["stack"] == "fsdp":
        return RECOMPUTE.index("full"), 0.5  # every second block, or every second product
    if mode in RECOMPUTE:
        return RECOMPUTE.index(mode), 1.0
    assumed.append("recomputation of as many blocks as do not fit")
    count = work["batch"] / (work["data"] * work["shard"] * work["micro_batch"])
    room = work["memory"] - state_bytes(work, sequence, work["micro_batch"])
    full = activation_bytes(work, sequence, work["micro_batch"], count)
    if full <= room:
        return RECOMPUTE.index("none"), 1.0
    return RECOMPUTE.index("full"), min(1.0, 1 - max(room, 0.1 * work["memory"]) / full) if full > 0.1 * work["memory"] else 0.0
