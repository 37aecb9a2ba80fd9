"""Rehearsed memory peaks next to those of a GPU, and the largest micro-batch that fits, rehearsed and tried.

    python benchmarks/rehearsed.py                  # on a machine with a GPU: both, as a table
    python benchmarks/rehearsed.py --real > FILE    # only the GPU, as lines of JSON
    python benchmarks/rehearsed.py --against FILE   # rehearsals on any machine, next to such a file

Each configuration runs in a process of its own, because an allocator keeps memory of earlier configurations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from phalanx.rehearsal.fake_gpu import CARDS, RehearsalDevice
from phalanx.rehearsal.rehearse import rehearse
from phalanx.rehearsal.result import Rehearsal
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

MIB = 2**20
LINE = "a line of text that a model may read again and again, and learn nothing from but its letters. "
RUN = f"""
[model]
dim = 2048
layers = 16
heads = 16
ffn = 8192
vocab = 32768
context = 131072
[data]
source = "memory"
documents = {json.dumps([LINE * 400] * 16)}
eval_fraction = 0.0
document_mask = false
[train]
batch = 4
micro_batch = 4
sequence_length = 4096
steps = 100
[optimizer]
learning_rate = 1e-4
"""
SHORT = f"data.documents={json.dumps([LINE * 15] * 400)}"
MOE = ("model.moe.experts=16", "model.moe.active=4", "model.moe.ffn=1024", "model.moe.shared=1", "model.moe.bias_rate=0.001")
GROUPED = ("model.kv_heads=8",)

CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "1b": GROUPED,
    "1b, documents": ("data.document_mask=true", SHORT, "train.micro_batch=2", "train.batch=2"),
    "1b, documents, grouped": ("data.document_mask=true", SHORT, "train.micro_batch=1", "train.batch=1", *GROUPED),
    "1b, full recompute": (*GROUPED, "memory.recompute=full", "train.micro_batch=8", "train.batch=8"),
    "1b, selective": (*GROUPED, "memory.recompute=selective"),
    "1b, fp8": (*GROUPED, "precision.compute=fp8"),
    "1b, 128k words, loss in chunks": ("model.vocab=128256", "memory.loss_chunk=1024", "train.batch=8"),
    "1b, 128k words": ("model.vocab=128256", "train.micro_batch=2", "train.batch=2"),
    "1b, offload": (*GROUPED, "memory.offload=cpu"),
    "1b, activations on host": (*GROUPED, "memory.activations=cpu"),
    "1b, bf16 moments, fp16": ("precision.optimizer=bf16", "precision.compute=fp16", "train.batch=8"),
    "3b, every second block": (
        *("model.dim=3072", "model.layers=24", "model.heads=24", "model.ffn=8192", "memory.recompute=full"),
        *("memory.recompute_every=2", "train.micro_batch=2", "train.batch=4"),
    ),
    "8 layers of 8b, muon": (
        *("model.dim=4096", "model.layers=8", "model.heads=32", "model.ffn=14336", "optimizer.name=muon"),
        *("train.micro_batch=2", "train.batch=2"),
    ),
    "gpt-2, fp32": (
        *("model.dim=768", "model.layers=12", "model.heads=12", "model.context=1024", "model.ffn=3072", "model.vocab=50257"),
        *("model.norm=layer", "model.activation=gelu", "model.positions=learned", "model.bias=true", "model.tied=true"),
        *("precision.compute=fp32", "train.sequence_length=1024", "train.micro_batch=16", "train.batch=16"),
    ),
    "experts": ("model.dim=1024", "model.heads=8", *MOE),
    "latent attention": (
        *("model.dim=1024", "model.heads=16", "model.ffn=4096", "model.mla.kv_rank=256"),
        "model.mla.q_rank=512",
    ),
}
TRIED = (
    *("1b", "1b, full recompute", "1b, fp8", "1b, 128k words, loss in chunks", "1b, 128k words", "3b, every second block"),
    *("gpt-2, fp32", "experts"),
)
"""Configurations whose largest micro-batch is searched: the largest that fits in rehearsal, and one more, are tried on the GPU."""


def job(name: str, micro_batch: int | None = None) -> tuple[Run, Plan]:
    sized = () if micro_batch is None else (f"train.micro_batch={micro_batch}", f"train.batch={micro_batch}")
    run = loads(RUN, overrides=(*CONFIGURATIONS[name], *sized))
    assert run.train.micro_batch is not None
    plan = Plan(
        layout=Layout(data=1),
        device="cuda",
        threads=4,
        micro_batch=run.train.micro_batch,
        accumulation=run.batch // run.train.micro_batch,
        compute=run.precision.compute or "bf16",
        parameters=run.model.parameters(),
        flops_per_token=1.0,
        peak_flops=None,
    )
    return run, plan


def steps(name: str, micro_batch: int | None = None, count: int = 3) -> dict[str, Any]:
    """Memory peaks of a few real steps."""
    import torch

    from phalanx.parallel.mesh import Mesh
    from phalanx.spec.plan import Place
    from phalanx.training.trainer import Trainer

    run, plan = job(name, micro_batch)
    mesh = Mesh(Place(), torch.device("cuda", 0), plan.layout)
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(run, plan, mesh, Path(tempfile.mkdtemp()) / "checkpoints")
    measured: dict[str, Any] = {"name": name, "micro_batch": plan.micro_batch, "allocated": [], "reserved": []}
    try:
        trainer.build()
        placed = trainer.state.placement()
        measured |= {"parameters": placed.parameters, "gradients": placed.gradients, "optimizer": placed.optimizer}
        for _ in range(count):
            trainer.step()
            measured["allocated"].append(torch.cuda.max_memory_allocated())
            measured["reserved"].append(torch.cuda.max_memory_reserved())
        measured["fits"], measured["kept"] = True, torch.cuda.memory_allocated()
    except torch.OutOfMemoryError as error:
        measured |= {"fits": False, "error": str(error)[:400]}
    trainer.close()
    return measured


def real(name: str, micro_batch: int | None) -> dict[str, Any]:
    """Measures one configuration on the GPU, in this process."""
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    measured = steps(name, micro_batch, count=3 if micro_batch is None else 2)
    free, total = torch.cuda.mem_get_info()
    return measured | {"total": total, "outside": total - free - torch.cuda.memory_reserved()}


def start(name: str, micro_batch: int | None = None) -> dict[str, Any]:
    """Measures one configuration on the GPU, in a new process."""
    size = [] if micro_batch is None else ["--micro-batch", str(micro_batch)]
    done = subprocess.run([sys.executable, __file__, "--one", name, *size], capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines[-1] if lines else {"name": name, "micro_batch": micro_batch, "error": done.stderr[-1500:]}


def rehearsed(name: str, micro_batch: int | None = None, capacity: int | None = None) -> Rehearsal:
    return rehearse(*job(name, micro_batch), 0, RehearsalDevice(card=CARDS["h200"], capacity=capacity))


def largest(name: str, capacity: int) -> int:
    """The largest micro-batch that fits in rehearsal."""
    low, high = 0, 1
    while rehearsed(name, high, capacity).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if rehearsed(name, middle, capacity).fits else (low, middle)
    return low


def table(lines: list[dict[str, Any]]) -> None:
    """Prints rehearsed and real peaks; `lines`: the output of `--real`."""
    peaks = {line["name"]: line for line in lines if line.get("allocated") and len(line["allocated"]) == 3}
    errors = []
    print("| configuration | micro-batch | real peak, MiB | rehearsed | error | real reserved, MiB | rehearsed |")
    print("|---|---|---|---|---|---|---|")
    for name, line in peaks.items():
        rehearsal, allocated, reserved = rehearsed(name), max(line["allocated"]), max(line["reserved"])
        errors.append(rehearsal.peak / allocated - 1)
        row = f"| {name} | {line['micro_batch']} | {allocated / MIB:,.1f} | {rehearsal.peak / MIB:,.1f} | {errors[-1]:+.3%} "
        print(row + f"| {reserved / MIB:,.0f} | {rehearsal.reserved / MIB:,.0f} |", flush=True)
    sizes = sorted(abs(error) for error in errors)
    if sizes:
        print(f"\nmedian error {statistics.median(sizes):.3%}, largest {sizes[-1]:.3%}, of {len(sizes)}\n")
    tries: dict[str, dict[int, bool]] = {}
    for line in lines:
        if "fits" in line and len(line["allocated"]) < 3:
            tries.setdefault(line["name"], {})[line["micro_batch"]] = line["fits"]
    total = next((line["total"] for line in lines if "total" in line), 0)
    print("| configuration | largest micro-batch, rehearsed | tried on the GPU |")
    print("|---|---|---|")
    for name, results in tries.items():
        text = ", ".join(f"{size} {'fits' if fits else 'does not'}" for size, fits in sorted(results.items()))
        print(f"| {name} | {largest(name, total)} | {text} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="only the GPU, as lines of JSON")
    parser.add_argument("--against", type=Path, help="a file with the output of --real")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--micro-batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", help="only these configurations")
    parser.add_argument("--tries", default="{}", help='micro-batches to try, as JSON: {"1b": [13, 14]}')
    args = parser.parse_args()
    if args.one:
        print(json.dumps(real(args.one, args.micro_batch)), flush=True)
        return
    if args.against:
        table([json.loads(line) for line in args.against.read_text().splitlines() if line.startswith("{")])
        return
    lines = []
    for name in args.names if args.names is not None else CONFIGURATIONS:
        lines.append(start(name))
        print(json.dumps(lines[-1]), flush=True)
    tries = json.loads(args.tries)
    if not args.real and not tries:
        total = next(line["total"] for line in lines if "total" in line)
        tries = {name: [size := largest(name, total), size + 1] for name in TRIED}
    for name, sizes in tries.items():
        for size in sizes:
            lines.append(start(name, size))
            print(json.dumps(lines[-1]), flush=True)
    if not args.real:
        table(lines)


if __name__ == "__main__":
    main()
