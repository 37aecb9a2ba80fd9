"""Problems of keys that the engine of a run does not have. Called by `spec/check`. Everything that the XLA engine does not compute is here: it
refuses it by name and ignores nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from phalanx.spec.errors import nearest_divisors
from phalanx.spec.keys import KEYS
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

TORCH = 'or set engine.name = "torch"'


class Refusal(NamedTuple):
    """A key that the XLA engine accepts with some values only."""

    key: str
    accepted: tuple[Any, ...]
    """Values that mean the same as on torch, None among them if the key may be absent."""
    why: str
    remedy: str


_XLA = (
    Refusal("model.mtp_depth", (0,), "does not compute multi-token prediction", "remove it"),
    Refusal("train.objective", ("next-token",), "has no reference model", "remove it"),
    Refusal("train.sample_every", (None,), "compiles no generation", "remove it and use `phalanx generate`"),
    Refusal("optimizer.sync_every", (1,), "updates all replicas in one program, in every step", "remove it"),
    Refusal("lora.rank", (None,), "has no adapters", "remove [lora]"),
    Refusal(
        "precision.compute", (None, "fp32", "bf16"), "has no loss scale and no scaled products", 'set it to "bf16" or "fp32"'
    ),
    Refusal("precision.reduce", ("fp32",), "adds up gradients in fp32", "remove it"),
    Refusal("memory.offload", ("auto", "none"), "keeps optimizer states on the devices", "remove it"),
    Refusal("memory.activations", ("device",), "keeps activations on the devices", "remove it"),
    Refusal("memory.bucket_size", (None,), "leaves messages to the compiler", "remove it"),
    Refusal("memory.compile", (None,), "compiles the whole step in any case", "remove it"),
    Refusal("memory.cuda_graphs", (None,), "compiles the whole step in any case", "remove it"),
    Refusal("layout.pipeline", (1,), "divides no layers among devices", "set it to 1 and raise layout.shard"),
    Refusal("checkpoint.export_hf", (False,), "does not export while it trains", "remove it and use `phalanx export`"),
    Refusal("watch.timeline", (False,), "is one compiled program, whose parts it does not see", "remove it"),
)
"""What the XLA engine lacks, in the order of the run file."""


def engine_takes(run: Run, **layout: Any) -> bool:
    """Whether the run's engine computes a layout with these keys, as far as that depends on the engine."""
    return not any("layout." in problem for problem in engine_problems(replace(run, layout=replace(Layout(), **layout))))


def missing_engine(run: Run) -> list[str]:
    """Why the engine of a run cannot compute on this machine: its extra is not installed."""
    lacking = [name for name in ("jax", "torchax") if run.engine.name == "xla" and find_spec(name) is None]
    if not lacking:
        return []
    return [f'engine.name = "xla" needs {" and ".join(lacking)}: install them with `pip install "phalanx[xla]"`.']


def engine_problems(run: Run) -> Iterator[str]:
    """What the run's engine does not compute."""
    if run.engine.name == "torch":
        if run.engine.devices_per_process is not None:
            yield '$engine.devices_per_process is set, but the torch engine has a process for each device: remove it, or set engine.name = "xla".'
        return
    for refusal in _XLA:
        value = KEYS[refusal.key].of(run)
        if value not in refusal.accepted:
            yield f"${refusal.key} is set, but $engine.name {refusal.why}: {refusal.remedy}, {TORCH}."
    layout, moe = run.layout, run.model.moe
    if layout.context > 1 and layout.context_method == "ulysses":
        yield (
            "$layout.context_method divides heads by an exchange that $engine.name does not have: set "
            f'layout.context_method = "ring" or "gather", {TORCH}.$(layout.context)'
        )
    if moe is not None and moe.ffn % layout.expert_tensor:
        yield (
            "$layout.expert_tensor does not divide $model.moe.ffn, but $engine.name divides each expert evenly: set it to "
            f"{nearest_divisors(layout.expert_tensor, moe.ffn)}, {TORCH}."
        )
