"""`phalanx checkpoint`: lists, inspects, verifies, compares, reshards, exports and prunes checkpoints. `phalanx export` and `phalanx import`
convert them to and from folders that transformers loads. None needs a GPU or as much memory as the model; list, inspect, verify and
prune do not need torch either."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from phalanx.checkpointing import checkpoint_info, directory
from phalanx.checkpointing.checkpoint_info import find_damage
from phalanx.checkpointing.find_checkpoint import (
    HF_FOLDER,
    checkpoint_locations,
    checkpoint_settings,
    existing_location,
    find,
    is_checkpoint,
    locate,
    no_checkpoint_message,
    path_or_url,
    pin_model,
    saves_none,
)
from phalanx.checkpointing.location import Local
from phalanx.cli.options import CHECKPOINT, AsJson, parse_size
from phalanx.cli.output import console, finish, print_json, progress_bar, report_checkpoint, tracked, warn_damaged
from phalanx.dashboard import checkpoint_tables as show
from phalanx.dashboard.numbers import size as format_size
from phalanx.events.rundir import RunDir
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.tensor_slice import TensorSlice

if TYPE_CHECKING:
    import torch

    from phalanx.checkpointing.format import SavedTensor
    from phalanx.checkpointing.location import Location
    from phalanx.evaluation.convert import Converted
    from phalanx.evaluation.push_hub import PushTarget

app = typer.Typer(help="List, inspect, verify, compare, reshard, export, import and prune checkpoints.", no_args_is_help=True)

_PLACE = "A run directory, a folder of checkpoints or a checkpoint; a path or a URL."
_FORMATS = ("hf", "peft", "safetensors", "torch")
_HF_FORMATS = ("hf", "peft")
Dtype = Annotated[str | None, Option(help="fp32, bf16 or fp16. Default: the stored dtype.")]
ShardSize = Annotated[str, Option(help="Maximum size of one safetensors file, for example 5GB.")]


@app.command("list")
def list_(
    path: Annotated[str, Argument(help=_PLACE, metavar="PATH")],
    verify: Annotated[
        bool, Option("--verify", help="Compare every byte with its checksum too. Default: check that every file has its size.")
    ] = False,
    json: AsJson = False,
) -> None:
    """List checkpoints and leftovers of interrupted saves, newest first: step, size, time, layout and problems."""
    found = []
    place = existing_location(path)
    if saves_none(place) and not directory.list_checkpoints(*checkpoint_locations(place)):
        raise RunError(no_checkpoint_message(path, [], []))
    alone = is_checkpoint(place) and directory.step_of(place) is None  # a renamed checkpoint, which no folder lists
    for checkpoints in [place] if alone else checkpoint_locations(place):
        infos = (
            [checkpoint_info.describe(place, verify=verify)] if alone else checkpoint_info.listing(checkpoints, verify=verify)
        )
        show.show_listing(console, str(checkpoints), infos)
        found += [asdict(info) for info in infos]
    finish(json, {"path": path, "checkpoints": found})


@app.command("inspect")
def inspect(
    path: Annotated[str, Argument(help=CHECKPOINT, metavar="CKPT")],
    layout: Annotated[
        str | None,
        Option(help='Show what another layout would read: "tensor=2,pipeline=2" (other degrees are 1), or a run file.'),
    ] = None,
    names: Annotated[
        str | None, Option(help="Tensors to show: part of a name, or a pattern with *. Default: the first ones.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the tensors, files and origin of a checkpoint, and what another layout would read of it."""
    located = locate(path)
    place = located.checkpoint
    skipped = warn_damaged(located.damaged)
    marker = directory.read_marker(place)
    tensors = checkpoint_info.tensors(place, marker)
    chosen = list(checkpoint_info.matching(tensors, names))
    if names is not None and not chosen:
        raise RunError(f"--names {names}: {place} has no such tensor; its names are like {next(iter(tensors))}.")
    run = marker.run
    info, kinds = checkpoint_info.describe(place), checkpoint_info.bytes_by_kind(tensors)
    change = None if layout is None else _change(path, tensors, layout)
    show.show_checkpoint(console, info, marker, kinds, chosen, None if names is None else len(chosen))
    if change is not None:
        show.show_relayout(console, change)
    if json:
        about = asdict(info)
        about |= {"progress": run.progress, "seed": run.seed, "data": run.data, "replicas": run.replicas, "kinds": kinds}
        about |= {"files": {name: file.to_json() for name, file in marker.files.items()}}
        about |= {"tensors": {item.name: _table(item) for item in chosen}, "damaged": skipped}
        if change is not None:
            about["change"] = asdict(change) | {"ranks": change.layout.ranks}
        print_json(about)


def _table(held: SavedTensor) -> dict[str, Any]:
    boxes = [
        {"file": file, "offset": saved.box.offset, "shape": saved.box.shape, "begin": saved.begin} for file, saved in held.boxes
    ]
    return {"dtype": held.dtype, "shape": held.shape, "bytes": held.bytes, "boxes": boxes}


def _change(path: str, tensors: dict[str, SavedTensor], asked: str) -> show.LayoutChange:
    """What the ranks of another layout would read, and which tensors they shard differently."""
    from phalanx.checkpointing.offline_writer import Cuts, read_needs
    from phalanx.training.reshard_run import on_layout, on_saved_layout

    found = find(path, verify=False)
    marker = directory.read_marker(found.checkpoint)
    then, now = on_saved_layout(found, marker), on_layout(found, marker, asked)
    before: Cuts = {}
    after: Cuts = {}
    read = list(tracked(read_needs(tensors, now.holds, now.distinct, after), "planning", len(now.distinct)))
    if then is not None:
        list(tracked(read_needs(tensors, then.holds, then.distinct, before), "planning", len(then.distinct)))
    uncut = {name: {TensorSlice.full(held.shape)} for name, held in tensors.items()}
    cut = [name for name in tensors if after.get(name) != (before if then is not None else uncut).get(name)]
    return show.LayoutChange(
        layout=now.layout, degrees=checkpoint_info.layout_text(asdict(now.layout)), distinct=read, tensors=len(tensors), cut=cut,
        micro_batch=now.plan.micro_batch if now.plan else None, accumulation=now.plan.accumulation if now.plan else None,
    )  # fmt: skip


@app.command("verify")
def verify(
    path: Annotated[str, Argument(help=f"{_PLACE} Verifies the newest of several.", metavar="PATH")],
    all_: Annotated[bool, Option("--all", help="Verify all of them.")] = False,
    json: AsJson = False,
) -> None:
    """Compare every byte with its checksum. The exit code is 1 if any byte differs."""
    place = existing_location(path)
    chosen = [place]
    if all_ or not is_checkpoint(place):
        chosen = directory.list_checkpoints(*checkpoint_locations(place))[: None if all_ else 1]
    if not chosen:
        raise RunError(no_checkpoint_message(path, checkpoint_locations(place), []))
    result = []
    for checkpoint in chosen:
        size = sum(checkpoint.sizes().values())
        with progress_bar(checkpoint.name, size) as advance:
            wrong = find_damage(checkpoint, advance)
        show.show_verified(console, str(checkpoint), size, wrong)
        result.append(
            {"path": str(checkpoint), "bytes": size, "valid": not wrong, "damages": [asdict(damage) for damage in wrong]}
        )
    valid = all(row["valid"] for row in result)
    finish(json, {"valid": valid, "checkpoints": result}, valid)


@app.command("diff")
def diff(
    a: Annotated[str, Argument(help=CHECKPOINT, metavar="A")],
    b: Annotated[str, Argument(help="The other checkpoint.", metavar="B")],
    largest: Annotated[int, Option(min=0, help="Number of differences to show, largest first.")] = 10,
    json: AsJson = False,
) -> None:
    """Compare two checkpoints of any layouts, tensor by tensor. The exit code is 1 if any bit differs."""
    located = locate(a), locate(b)
    for side in located:
        warn_damaged(side.damaged)
    places = [side.checkpoint for side in located]
    from phalanx.checkpointing.restore import CheckpointReader, Difference, compare, compare_metadata

    with closing(CheckpointReader(places[0])) as first, closing(CheckpointReader(places[1])) as second:
        compared = list(tracked(compare(first, second), "comparing", len({*first.names, *second.names})))
    different = [result for result in compared if isinstance(result, Difference)]
    equal = len(compared) - len(different)
    # Step counters come last: between different steps they all differ and would hide the rest.
    different.sort(
        key=lambda found: (found.kind in ("values", "format"), found.name.endswith("/step"), -found.largest, found.name)
    )
    contents = compare_metadata(first, second)
    show.show_differences(console, (str(places[0]), str(places[1])), different, contents, equal=equal, most=largest)
    same = not different and not contents
    metadata = {key: {"a": pair[0], "b": pair[1]} for key, pair in contents.items()}
    finite = [{key: str(cell) if cell == math.inf else cell for key, cell in asdict(row).items()} for row in different]
    finish(json, {"same": same, "equal": equal, "metadata": metadata, "different": finite}, same)


@app.command("reshard")
def reshard(
    path: Annotated[str, Argument(help=CHECKPOINT, metavar="A")],
    layout: Annotated[str, Argument(help='Degrees such as "tensor=2,pipeline=2" (others are 1), or a run file.')],
    out: Annotated[str, Argument(help="The run directory to write, a new or empty one, or a URL for checkpoints.")],
    json: AsJson = False,
) -> None:
    """Write a checkpoint in another layout. Training does not need this: any layout loads any checkpoint."""
    found = find(path, verify=False)
    skipped = warn_damaged(found.damaged)
    from phalanx.checkpointing.restore import CheckpointReader
    from phalanx.training.reshard_run import on_layout, write

    saved = CheckpointReader(found.checkpoint)
    laid = on_layout(found, saved.marker, layout)
    written = write(saved, found, laid, out)
    saved.close()
    info = checkpoint_info.describe(written)
    if json:
        print_json(asdict(info) | {"from": str(found.checkpoint), "damaged": skipped})
        return
    console.print(
        f"step {info.step} for {checkpoint_info.layout_text(info.layout)} ({info.ranks} rank{'s' if info.ranks != 1 else ''}) → {written}",
        style="bold",
        soft_wrap=True,
        markup=False,
    )


@app.command("prune")
def prune(
    path: Annotated[str, Argument(help="A run directory.", metavar="RUN_DIR")],
    keep_last: Annotated[
        int | None, Option(min=1, help="Number of newest checkpoints to keep. Default: that of the run file.")
    ] = None,
    keep_every: Annotated[int | None, Option(min=1, help="Also keep a checkpoint every N steps.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be removed.")] = False,
    json: AsJson = False,
) -> None:
    """Remove older checkpoints and leftovers of interrupted saves, but never the newest valid one, which is verified first."""
    place = existing_location(path)
    if not isinstance(place, Local) or not RunDir(place.path).exists:
        raise RunError(
            f"{path} is not a run directory, because it has no run.toml: name one, so that a running job can be detected."
        )
    keys = cast(dict[str, Any], checkpoint_settings(place))
    last, every_ = keep_last or keys.get("keep_last", 2), keep_every or keys.get("keep_every")
    removed, kept, damaged = list[str](), list[str](), list[str]()
    with _locked(RunDir(place.path), path):
        for checkpoints in checkpoint_locations(place):
            if not dry_run:
                directory.restore_replaced(checkpoints)
            newest, bad = directory.newest(checkpoints, check=directory.verify)
            if newest is None:
                raise RunError(f"{no_checkpoint_message(path, [checkpoints], bad)} Nothing was removed there.")
            left = directory.leftovers(checkpoints)
            going = directory.prunable(checkpoints, last, newest, every_) + left
            kept += [str(found) for found in directory.list_checkpoints(checkpoints) if found.name not in going]
            removed += [str(checkpoints / name) for name in going]
            damaged += [str(item) for item in bad]
            if not dry_run:
                directory.prune(checkpoints, last, newest, every_)
                for name in left:
                    (checkpoints / name).remove()
        exports = _exports(place, removed, kept)
        removed += [str(export) for export in exports]
        for export in exports if not dry_run else []:
            export.remove()
    show.show_pruned(console, removed, kept, damaged, dry_run=dry_run)
    finish(json, {"removed": removed, "kept": kept, "damaged": damaged, "dry_run": dry_run})


@app.command("export")
def export(
    checkpoint: Annotated[str, Argument(help=CHECKPOINT, metavar="CKPT")],
    out: Annotated[Path, Argument(help="The folder to write, a new or empty one; for torch, a new file.", metavar="OUT")],
    kind: Annotated[str, Option("--format", help=f"{', '.join(_FORMATS)}.")] = "hf",
    dtype: Dtype = None,
    optimizer: Annotated[bool, Option("--optimizer", help="Include the optimizer state. Not for hf.")] = False,
    shard_size: ShardSize = "5GB",
    json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, as LoRA adapters for PEFT, as plain safetensors, or as one file for torch.load."""
    problems = []
    if kind not in _FORMATS:
        problems.append(f"--format {kind}: choose {', '.join(_FORMATS)}.")
    if kind in ("hf", "peft") and optimizer:
        problems.append("--optimizer: a Hugging Face folder has no optimizer state; add --format safetensors or torch.")
    refuse(problems)
    if kind in _HF_FORMATS:
        export_hf(checkpoint, out, dtype, shard_size, kind=kind, json=json)
        return
    limit = parse_size("--shard-size", shard_size)
    from phalanx.checkpointing.offline_writer import to_safetensors, to_torch
    from phalanx.checkpointing.restore import CheckpointReader

    format_ = _torch_dtype(dtype)
    located = locate(checkpoint)
    used = report_checkpoint(located.checkpoint, located.step, located.damaged)
    saved = CheckpointReader(located.checkpoint)
    if kind == "torch":
        written = to_torch(saved, out, optimizer=optimizer, dtype=format_)
    else:
        written = to_safetensors(saved, out, optimizer=optimizer, dtype=format_, shard_size=limit)
    saved.close()
    if json:
        table = asdict(written)
        print_json({"path": str(out), "format": kind, "dtypes": table.pop("formats")} | table | used)
        return
    dtypes = "+".join(written.formats)
    print(f"{written.tensors} tensors ({dtypes}, {format_size(written.bytes)}, {_files(written.files)}) → {out}")


def export_hf(
    checkpoint: Annotated[str, Argument(help=CHECKPOINT, metavar="CKPT")],
    out: Annotated[
        Path | None, Argument(help="The folder to write: a new or empty one. Default with --push: none.", metavar="HF_DIR")
    ] = None,
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    check: Annotated[
        Path | None,
        Option(help="Logits that a run wrote at a save (hf/step-N.logits). The exported model must reproduce them."),
    ] = None,
    kind: Annotated[
        str,
        Option(
            "--format", help="hf: the whole model, with LoRA adapters added to its weights; peft: the adapters alone, for PEFT."
        ),
    ] = "hf",
    push: Annotated[
        str | None,
        Option(help="Upload the files to this repository of the Hugging Face hub, such as org/name.", metavar="REPO"),
    ] = None,
    private: Annotated[bool, Option("--private", help="--push: make a new repository private.")] = False,
    revision: Annotated[str | None, Option(help="--push: the branch to write. Default: main.", metavar="BRANCH")] = None,
    json: AsJson = False,
) -> None:
    """Write a model for transformers: weights in safetensors, config.json and the tokenizer, to a folder, to the Hugging Face hub, or both; or LoRA
    adapters for PEFT."""
    _check_format(kind, {"--check compares": check, "--push uploads": push})
    _check_push(out, push, {"--private": private, "--revision": revision is not None})
    if kind == "peft":
        assert out is not None, "without --push there is a folder"
        _export_peft(checkpoint, out, dtype, json=json)
        return
    target = None if push is None else _push_target(push, branch=revision, private=private)
    from phalanx.checkpointing.hf_folder import read_reference
    from phalanx.evaluation.convert import export_checkpoint

    _torch_dtype(dtype)
    reference = None if check is None else read_reference(check)
    limit = parse_size("--shard-size", shard_size)
    with ExitStack() as stack:
        folder = out if out is not None else Path(stack.enter_context(TemporaryDirectory(prefix="phalanx-export-"))) / "model"
        converted = export_checkpoint(checkpoint, folder, dtype, limit, reference)
        step = None if converted.source is None else converted.source.step
        pushed = (
            None if target is None else target.push(folder, "Upload a model" + ("" if step is None else f" of step {step}"))
        )
    if _print_report(converted, json, {} if pushed is None else {"pushed": asdict(pushed)}):
        return
    places = [] if out is None else [str(out)]
    places += [] if pushed is None else [f"{pushed.url} (commit {pushed.commit[:12]})"]
    _print_converted(converted, " and ".join(places))


def _print_converted(converted: Converted, place: str) -> None:
    """Says what was written where, and how well it reproduces the logits of the run."""
    print(f"{converted.parameters:,} parameters ({converted.family}, {converted.dtype}, {_files(converted.files)}) → {place}")
    if (match := converted.match) is not None:
        print(
            f"Loaded by {match.opened}, its logits differ by {match.difference:.2g} of the largest; {match.allowed:.2g} is allowed."
        )


def _check_format(kind: str, of_models: Mapping[str, object]) -> None:
    """Refuses an unknown format, and options that need a whole model with adapters alone."""
    problems = [f"--format {kind}: choose {', '.join(_HF_FORMATS)}."] if kind not in _HF_FORMATS else []
    for option, value in of_models.items():
        if kind == "peft" and value is not None:
            problems.append(f"{option} a whole model: remove it, or take --format hf.")
    refuse(problems)


def _export_peft(checkpoint: str, out: Path, dtype: str | None, *, json: bool) -> None:
    """Write LoRA adapters for PEFT."""
    from phalanx.evaluation.peft_folder import export_adapters

    _torch_dtype(dtype)
    converted = export_adapters(checkpoint, out, dtype)
    if not _print_report(converted, json):
        print(f"{converted.parameters:,} parameters of adapters ({converted.family}, {converted.dtype}) → {out}")


@app.command("import")
def import_(
    folder: Annotated[
        Path,
        Argument(
            help="A folder with config.json and weights in safetensors, or its name on the Hugging Face hub.", metavar="HF_DIR"
        ),
    ],
    out: Annotated[Path, Argument(help="The run directory to write: a new or empty one.", metavar="OUT")],
    json: AsJson = False,
) -> None:
    """Convert a Hugging Face model into a run directory. The model is checked first, then streamed, whatever its size."""
    folder = Path(pin_model(folder, HF_FOLDER))
    from phalanx.evaluation.convert import import_folder

    converted = import_folder(folder, out)
    if not _print_report(converted, json):
        print(f"{converted.parameters:,} parameters ({converted.family}, {converted.dtype}) → {out}")
        print(f'Continue with `phalanx generate {out} "…"`, or with [model] from = "{out}" in a run file.')


def _check_push(out: Path | None, push: str | None, others: dict[str, bool]) -> None:
    if push is None:
        refuse([f"{option} describes an upload: add --push REPO." for option, given in others.items() if given])
        if out is None:
            raise RunError("Name the folder to write, HF_DIR, or a repository of the Hugging Face hub with --push.")


def _push_target(repository: str, *, branch: str | None, private: bool) -> PushTarget:
    from phalanx.evaluation.push_hub import PushTarget

    return PushTarget(repository, branch=branch, private=private)


def _print_report(converted: Converted, json: bool, more: dict[str, Any] | None = None) -> bool:
    """Prints the object of --json, with `more` in it, and returns True, or prints the notes for people."""
    source = converted.source
    used = {} if source is None else report_checkpoint(path_or_url(source.checkpoint), source.step, source.damaged)
    if json:
        table = asdict(replace(converted, source=None)) | {"path": str(converted.path)}
        del table["source"]
        print_json(table | (table.pop("match") or {}) | used | (more or {}))
        return True
    for note in converted.notes:
        print(f"Note: {note}")
    return False


def _torch_dtype(name: str | None) -> torch.dtype | None:
    from phalanx.evaluation.convert import TORCH

    if name is not None and name not in TORCH:
        raise RunError(f"--dtype {name}: choose {', '.join(TORCH)}.")
    return None if name is None else TORCH[name]


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _exports(place: Location, removed: list[str], kept: list[str]) -> list[Location]:
    """Exports (checkpoint.export_hf) of checkpoints that are removed everywhere: they are removed too, as in a run."""
    gone = {name.rpartition("/")[2] for name in removed} - {name.rpartition("/")[2] for name in kept}
    folder = place / "hf"
    return [folder / name for name in sorted(folder.entries()) if name.removesuffix(".logits") in gone]


@contextmanager
def _locked(rundir: RunDir, path: str) -> Iterator[None]:
    """Locks the run directory; refuses if a job is running in it."""
    if not rundir.acquire():
        raise RunError(f"{path} is in use by a running job, which prunes its checkpoints itself: wait for it, or stop it.")
    try:
        yield
    finally:
        rundir.release()
