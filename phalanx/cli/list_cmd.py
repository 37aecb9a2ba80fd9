"""`phalanx models`, `phalanx clusters` and `phalanx schema` list the names that a run file may use, and its JSON schema; `phalanx doctor`
examines this machine."""

from __future__ import annotations

import json as encoding
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish, plain_table, print_json
from phalanx.dashboard.numbers import count
from phalanx.host.probe import this_machine
from phalanx.planning.machines import own_parts, part_template
from phalanx.planning.machines.catalogue import KINDS, entries, named_gpu
from phalanx.planning.machines.hardware import hardware
from phalanx.spec import schema as run_schema
from phalanx.spec.errors import RunError, quote
from phalanx.spec.load import load
from phalanx.spec.model import PRESETS
from phalanx.spec.run import TOKENIZER_VOCAB, Cluster, Run

_STATE_BYTES = 16  # per parameter in training: weight, gradient and two Adam moments in fp32


def models(
    overrides: Annotated[list[str] | None, Argument(help="--axes: settings that override the run file.")] = None,
    axes: Annotated[
        Path | None,
        Option(
            metavar="RUN.toml",
            help="Show how tensor ranks divide the model of a run file instead, inferred from its own graph: layout.tensor of them, or 2.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the model presets with their size and cost; with --axes, how tensor ranks divide a model."""
    if axes is not None:
        from phalanx.launch.model_check import inferred_cuts

        found = inferred_cuts(load(axes, overrides or []))
        console.print(found.text, markup=False, soft_wrap=True)
        finish(json, found.plan)
        return
    if overrides:
        raise RunError(
            f"{quote(overrides[0])} belongs to `phalanx models --axes RUN.toml`: `phalanx models` lists all presets."
        )
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
    kind: Annotated[str | None, Argument(help=f"show, or the one kind to list: {', '.join(KINDS)}.")] = None,
    name: Annotated[
        str | None, Argument(help="With show: a cluster, node, GPU or link of the catalogue, or a TOML file.")
    ] = None,
    toml: Annotated[
        bool, Option("--toml", help="With show: print it as a TOML file, to be changed into a part of your own.")
    ] = False,
    json: AsJson = False,
) -> None:
    """List the clusters, GPUs, nodes, links and failure rates in the catalogue, by their names in the run file. `phalanx clusters show
    NAME` shows one of them."""
    if kind == "show":
        _show_entry(name, toml, json)
        return
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(('show', *KINDS))}.")
    if name is not None or toml:
        given = "--toml" if name is None else quote(name)
        raise RunError(f"{given} belongs to `phalanx clusters show NAME`: write show, and one name.")
    chosen = [listed for listed in _COLUMNS if kind in (None, listed)]
    for listed in chosen:
        titles, row = _COLUMNS[listed]
        console.print(plain_table(titles, [(key, *map(str, row(key, entry))) for key, entry in entries(listed).items()]))
        console.print()
    finish(json, {listed: {key: dict(value) for key, value in entries(listed).items()} for listed in chosen})


def _show_entry(name: str | None, toml: bool, json: bool) -> None:
    """Shows one entry: as sentences with the file to begin one's own with, or that file alone."""
    if name is None:
        raise RunError(
            "`phalanx clusters show` needs a name, such as `phalanx clusters show h100-8`; `phalanx clusters` lists them."
        )
    if own_parts.is_file(name):
        if toml:
            raise RunError(f"--toml prints an entry of the catalogue, and {name} is a file already: remove --toml.")
        kind, text = "clusters", ""
    else:
        kind = part_template.kind_of(name, "phalanx clusters show")
        text = part_template.template(kind, name)
    if toml and not json:
        print(text, end="")
        return
    answer: dict[str, Any] = {"name": name, "kind": kind, "toml": text}
    if kind == "clusters":
        machines = hardware(Run(cluster=Cluster(name=name)), None)
        console.print(machines.name, style="bold")
        console.print("\n".join(machines.assumed), markup=False, soft_wrap=True)
        keys = ("gpus", "nodes", "nics", "network", "island", "island_bandwidth", "host_memory")
        answer |= {key: getattr(machines, key) for key in keys} | {"gpu": machines.gpu.key, "assumed": list(machines.assumed)}
    elif not toml:
        console.print(text, markup=False, soft_wrap=True, end="")
    finish(json, answer)


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


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Argument(help="The shell that will read it.")]) -> None:
    """Print the script that completes verbs and options in a shell: eval "$(phalanx completion bash)"."""
    from typer.completion import get_completion_script

    print(get_completion_script(prog_name="phalanx", complete_var="_PHALANX_COMPLETE", shell=shell))
