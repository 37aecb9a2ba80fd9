"""Published steps of real runs: the rows of a CSV file become columns that `planning/cost/step_time` can predict.

The columns of the file are those of benchmarks/published/steps.csv. Rules infer missing values, which are counted; rows that
no rule can complete are excluded with a reason. `fit` and the accuracy benchmark call it; no rule refers to a particular row.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.planning.cost.job_table import RECOMPUTE, JobTable, take
from phalanx.spec.errors import RunError
from planner import step_layout as layouts
from planner.step_machine import kind_of, machine, precision_of
from planner.step_model import model, number

Row = dict[str, str]
COLUMNS = (
    *(
        "id",
        "source",
        "year",
        "model_name",
        "params_B",
        "active_params_B",
        "layers",
        "hidden",
        "ffn_hidden",
        "heads",
        "kv_heads",
    ),
    *("vocab", "experts", "top_k", "seq_len", "gpu", "n_gpus", "gpus_per_node", "intra_bw_GBs", "inter_bw_Gbps_per_gpu"),
    *("tp", "cp", "pp", "vpp", "ep", "zero_or_fsdp", "sequence_parallel", "recompute", "precision", "micro_batch"),
    *("global_batch_seqs", "schedule", "iter_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "notes", "flags"),
    "conv_class",
)
"""The columns that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The usable rows of a file."""

    work: JobTable
    seconds: np.ndarray
    """Measured seconds of a step."""
    ids: tuple[str, ...]
    sources: np.ndarray
    publications: np.ndarray
    """The document of each source: its editions, tables and sections are one publication."""
    family: np.ndarray
    kind: np.ndarray
    """The device, such as GB200."""
    precision: np.ndarray
    stack: np.ndarray
    year: np.ndarray
    overlapped: np.ndarray
    """0 if the row says that communication is not overlapped."""
    repeated: np.ndarray
    """Fraction of the blocks with "full" recomputation."""
    recipe: np.ndarray
    routing: np.ndarray
    dispatch: np.ndarray
    moe: np.ndarray
    core: np.ndarray
    """Whether the row is complete enough for validation."""
    jobs: tuple[str, ...]
    """Key of the job; rows with the same key differ only in the layout."""
    excluded: tuple[tuple[str, str], ...]
    """(id, reason)."""
    excluded_core: tuple[str, ...]
    """Excluded rows that are marked as core."""
    assumed: Counter[str]

    def take(self, index: np.ndarray) -> Table:
        """The rows at `index`."""
        rows = np.arange(len(self.ids))[index]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if name == "work":
                values[name] = take(value, rows)
            elif isinstance(value, np.ndarray):
                values[name] = value[rows]
            elif name in ("ids", "jobs"):
                values[name] = tuple(value[row] for row in rows)
        return Table(**values)


def read(path: Path, *, core: bool = True) -> Table:
    """Reads a file; only rows marked as core, unless `core` is False."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not core or row.get("core", "1") == "1"]
    missing = sorted(set(COLUMNS) - set(rows[0] if rows else ()))
    if missing:
        raise RunError(
            [
                f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)} of benchmarks/published/steps.csv."
            ]
        )
    return table(rows)


def table(rows: list[Row]) -> Table:
    """Converts rows, and excludes those that cannot be used."""
    good: list[tuple[Row, dict[str, Any]]] = []
    excluded: list[tuple[str, str]] = []
    assumed: Counter[str] = Counter()
    for row in rows:
        notes: list[str] = []
        try:
            found = _row(row, notes)
        except (ValueError, ZeroDivisionError) as error:
            found = f"a number cannot be read ({error})"
        if isinstance(found, str):
            excluded.append((row["id"], found))
        else:
            good.append((row, found))
            assumed.update(notes)
    if not good:
        raise RunError(
            [f"None of {len(rows)} rows can be used, the first because {excluded[0][1] if excluded else 'there is none'}."]
        )
    names = {field.name for field in fields(JobTable) if field.init}
    columns = {name: np.array([found[name] for _, found in good], dtype=float) for name in names if good and name in good[0][1]}

    def column(name: str) -> np.ndarray:
        return np.array([found[name] for _, found in good])

    return Table(
        work=JobTable(**columns),
        seconds=column("seconds"),
        ids=tuple(row["id"] for row, _ in good),
        sources=np.array([row["source"] for row, _ in good]),
        publications=np.array([publication(row["source"]) for row, _ in good]),
        family=column("family"),
        kind=column("kind"),
        precision=column("precision"),
        stack=column("stack"),
        year=column("year"),
        overlapped=column("overlapped"),
        repeated=column("repeated"),
        recipe=column("recipe"),
        routing=column("routing"),
        dispatch=column("dispatch"),
        moe=column("experts") > 0,
        core=np.array([row.get("core", "1") == "1" for row, _ in good]),
        jobs=tuple(job(row) for row, _ in good),
        excluded=tuple(excluded),
        excluded_core=tuple(row["id"] for row in rows if row.get("core", "1") == "1" and row["id"] in dict(excluded)),
        assumed=assumed,
    )


def publication(source: str) -> str:
    """The document of a source: its name without section, table, version, and text in quotes or brackets."""
    short = re.split(r",| - |; | section| sec | Tables?\b| T\d+\b| v\d|\(|:", source)[0]
    short = re.sub(r"\b(19|20)\d\d[-\d]*\b|\d+\.\d[\d.]*", "", short)
    return " ".join(short.split()[:3]).lower()


def job(row: Row) -> str:
    """A key of everything but the layout."""
    same = ("source", "model_name", "layers", "hidden", "heads", "gpu", "n_gpus", "seq_len", "global_batch_seqs", "precision")
    return "|".join(row[name] for name in same)


def software_year(row: Row) -> int:
    """The year of the software: a paper of the first months of a year used software of the year before."""
    printed = re.search(r"arXiv (\d\d)(\d\d)\.", row["source"])
    return 2000 + int(printed[1]) - (int(printed[2]) <= 3) if printed else int(row["year"])


def _row(row: Row, assumed: list[str]) -> dict[str, Any] | str:
    """The values of a row, or the reason why it cannot be used."""
    reason = _useless(row)
    kind = kind_of(row)
    sizes = model(row, assumed)
    if reason or kind is None or sizes is None or not row["n_gpus"] or not row["seq_len"]:
        if reason:
            return reason
        if kind is None:
            return f"no rule knows the device {row['gpu'] or '(not published)'}"
        return (
            "sizes of the model are not published" if sizes is None else "number of devices or sequence length is not published"
        )
    stack, precision, year = layouts.stack_of(row), precision_of(row), software_year(row)
    degrees, ranks = layouts.degrees(row), float(row["n_gpus"])
    replicas = ranks / (degrees["tensor"] * degrees["context"] * degrees["pipeline"])
    if replicas < 1:
        return "degrees of parallelism multiply to more than the devices"
    zero, shard = layouts.sharding(row, stack, replicas)
    sequence = float(row["seq_len"])
    found: dict[str, Any] = {
        name: 0.0 for name in ("sparse_layers", "experts", "active", "expert_ffn", "shared_ffn", "active_groups")
    }
    found |= sizes | degrees | machine(row, kind, precision, ranks)
    found |= {"zero": zero, "shard": shard, "data": replicas / shard, "ranks": ranks, "sequence": sequence}
    found |= {"family": kind.family, "kind": kind.name, "precision": precision, "stack": stack, "year": year}
    found["expert_tensor"] = layouts.expert_tensor(row, found, assumed)
    said = f"{row['notes']} {row['source']} {row['schedule']} {row['zero_or_fsdp']}".lower()
    # Attention that keeps its scores on the chip came in 2022; Megatron made it the default in 2024.
    found["scores"] = 2 * int(year < (2024 if stack == "megatron" else 2023) and "flash" not in said)
    found |= {"recipe": layouts.recipe(row), "routing": layouts.routing(row), "dispatch": layouts.dispatch(row)}
    found["wire"] = 2.0 if "pure" in row["precision"].lower() else 4.0
    found["moments"] = 4.0 if "pure" in row["precision"].lower() or "bf16 moments" in said else 8.0
    found["gathered"] = 1.0 if "float8" in row["precision"].lower() else 0.0  # torchao's name, and its habit
    found["schedule"], found["stages"] = layouts.schedule(row, found, assumed)
    found["sequence_parallel"] = layouts.sequence_parallel(row, stack, degrees["tensor"], assumed)
    found["batch"], found["micro_batch"] = layouts.batch_and_micro(row, replicas, found, assumed)
    found["recompute"], found["repeated"] = layouts.recompute(row, found, assumed)
    found["compute_bytes"] = 4 if precision == "fp32" else 2
    found["fp8"] = int(precision in ("fp8", "fp4"))
    found["compiled"] = int("compile" in said or stack in ("jax", "tpu"))
    if found["zero"] == 3 and found["pipeline"] > 1:
        found["zero"] = 2  # pipelines keep gathered parameters for all micro-batches
    found["overlapped"] = int(not re.search(r"no (comm )?overlap", said))
    seconds = _seconds(row, found)
    return "no time, throughput or FLOP/s is published" if seconds is None else found | {"seconds": seconds}


def _useless(row: Row) -> str | None:
    """The reason to exclude a row that is not a step, or not a step that a planner plans."""
    said, zero = f"{row['notes']} {row['source']} {row['flags']}".lower(), row["zero_or_fsdp"].lower()
    if re.search(r"\boom\b", f"{row['id']} {said}"):
        return "ran out of memory"
    if "offload" in zero:
        return "states or activations offloaded to the host, how much is not published"
    if "zero-3" in zero and "deepspeed" in f"{zero} {said}" and int(row["year"]) < 2023:
        return "ZeRO-3 of DeepSpeed before 2023: 31-73 % slower than today's"
    if re.search(r"gpu-hours|whole-run|production run", said):
        return "a whole run's average, stops included"
    if "deterministic" in said:
        return "deterministic kernels, slow on purpose"
    if re.search(r"\+/-\s?40|noise", row["flags"].lower()):
        return "its authors call it noisy"
    return None


def _seconds(row: Row, found: dict[str, Any]) -> float | None:
    """The time of a step: as printed, or from tokens per second, or from FLOP/s as the source counts them."""
    given = number(row, "iter_time_s")
    if given:
        return given
    tokens = found["batch"] * found["sequence"]
    speed = number(row, "tokens_per_s_per_gpu")
    if speed:
        return float(tokens / (speed * found["ranks"]))
    rate = number(row, "tflops_per_gpu")
    if rate is None and row["mfu_pct"]:
        rate = float(row["mfu_pct"]) / 100 * found["peak16"] / 1e12
    if not rate:
        return None
    sparse = found["sparse_layers"]
    weights = found["layers"] * found["attention_weights"] + found["vocab"] * found["dim"]
    weights += (found["layers"] - sparse) * (2 + found["gated"]) * found["dim"] * found["ffn"]
    weights += sparse * 3 * found["dim"] * (found["expert_ffn"] * found["active"] + found["shared_ffn"])
    widths = found["score_width"] + found["value_width"]
    causal = 0.5 if row["conv_class"] == "model-causal-attn" else 1.0
    flops = 6 * weights + 6 * found["layers"] * widths * found["sequence"] * causal
    if row["conv_class"] == "hardware" and found["recompute"] == RECOMPUTE.index("full"):
        flops *= 4 / 3
    return float(tokens * flops / (rate * 1e12 * found["ranks"]))
