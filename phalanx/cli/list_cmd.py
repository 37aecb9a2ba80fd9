"""`phalanx models`, `phalanx clusters` and `phalanx schema` list the names that a run file may use, and its JSON schema; `phalanx doctor`
examines this machine."""

from __future__ import annotations

import json as encoding
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish, plain_table, print_json
from phalanx.dashboard.numbers import count
from phalanx.host.probe import this_machine
from phalanx.planning.machines.catalogue import KINDS, entries, named_gpu
from phalanx.spec import schema as run_schema
from phalanx.spec.model import PRESETS
from phalanx.spec.run import TOKENIZER_VOCAB

_STATE_BYTES = 16  # per parameter in training: weight, gradient and two Adam moments in fp32


def models(json: AsJson = False) -> None:
    """List the model presets with their size and cost."""
    rows, cells = [], []
    for name, preset in PRESETS.items():
        spec = replace(preset, vocab=preset.vocab or TOKENIZER_VOCAB["byte"])
        total, active, flops = spec.parameters(), spec.active_parameters(), spec.flops_per_token(spec.context)
        state = total * _STATE_BYTES
        shape = {"layers": spec.layers, "dim": spec.dim, "context": spec.context, "vocab": preset.vocab}
        vocab = "" if preset.vocab is None else f"{preset.vocab:,}"  # none: it is the tokenizer's
        sizes = (str(spec.layers), f"{spec.dim:,}", f"{spec.context:,}", vocab)
        cells.append((name, count(total), count(active), *sizes, f"{flops / 1e9:,.1f}"))
        rows.append(
            {"name": name, "parameters": total, "active": active, **shape, "flops_per_token": flops, "state_bytes": state}
        )
    titles = ("preset", "params", "active", "layers", "width", "context", "vocab", "GFLOP/token")
    console.print(plain_table(titles, cells))
    words = f"Training takes {_STATE_BYTES} bytes per parameter, and activations. GFLOP of a token at the whole context. No vocab: the tokenizer's."
    console.print(words, style="dim", soft_wrap=True)
    finish(json, {"models": rows})


def clusters(
    json: AsJson = False, kind: Annotated[str | None, Argument(help=f"List one kind only: {', '.join(KINDS)}.")] = None
) -> None:
    """List the clusters, GPUs, nodes, links and failure rates in the catalogue, by their names in the run file."""
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}.")
    chosen = [name for name in _COLUMNS if kind in (None, name)]
    for name in chosen:
        titles, row = _COLUMNS[name]
        console.print(plain_table(titles, [(key, *map(str, row(key, entry))) for key, entry in entries(name).items()]))
        console.print()
    finish(json, {name: {key: dict(value) for key, value in entries(name).items()} for name in chosen})


def _gpu_row(key: str, entry: Any) -> tuple[str, ...]:
    gpu = named_gpu(key, "cluster.gpu")
    peaks = [gpu.peak(form) for form in ("fp32", "fp16" if gpu.peak("bf16") is None else "bf16", "fp8", "fp4")]
    return (
        *("" if peak is None else f"{peak / 1e12:,.0f}" if peak >= 1e13 else f"{peak / 1e12:.1f}" for peak in peaks),
        f"{gpu.memory / 2**30:.0f}",
        f"{gpu.bandwidth / 1e9:,.0f}",
        "" if gpu.power is None else f"{gpu.power:,.0f}",
        "" if gpu.price is None else f"{gpu.price:.2f}",
    )


def _node_row(key: str, entry: Any) -> tuple[str, ...]:
    network = f"{entry['nics']} × {entry['network']}{' on rails' if entry['rails'] else ''}"
    return entry["gpus"], f"{entry['island']:,}", entry["link"], network, entry["name"]


def _failure_row(key: str, entry: Any) -> tuple[str, ...]:
    observed = entry["observed"]
    return f"{observed['gpus'] * observed['days'] / sum(entry['components'].values()):,.0f}", entry["name"]


_COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[str, Any], tuple[str, ...]]]] = {
    "clusters": (
        ("cluster.name", "devices", "cluster.gpu", "cluster.node", ""),
        lambda key, entry: (f"{entry['gpus']:,}", entry["gpu"], entry["node"], entry["name"]),
    ),
    "gpus": (("cluster.gpu", "fp32", "16-bit", "fp8", "fp4 TFLOP/s", "GiB", "GB/s", "W", "$/hour"), _gpu_row),
    "nodes": (("cluster.node", "devices", "island", "link", "network", ""), _node_row),
    "links": (
        ("cluster.network", "GB/s one way", "kind", ""),
        lambda key, entry: (f"{entry['bandwidth']:g}", entry["kind"], entry["name"]),
    ),
    "failures": (("failures", "GPU-days of one", ""), _failure_row),
}
"""Titles of each kind's table, and the cells of an entry after its name."""


def schema(json: AsJson = False) -> None:
    """Print the JSON schema of run files, for editors that complete and check TOML files."""
    if json:
        print_json(run_schema.schema())
    else:
        print(encoding.dumps(run_schema.schema(), indent=2, ensure_ascii=False))


def doctor(
    directory: Annotated[Path, Argument(help="The directory in which runs would be written.")] = Path("."),
    json: AsJson = False,
) -> None:
    """Show what this machine has and what would stop a run. The exit code is 1 if something would."""
    from phalanx.launch.health_check import examine

    report = examine(directory, this_machine())
    report.render(console)
    finish(json, report.to_json(), not report.problems)
