"""`phalanx export` and `phalanx import`: checkpoints to and from folders that transformers loads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import CHECKPOINT, AsJson, parse_size
from phalanx.cli.output import print_json
from phalanx.spec.errors import RunError

if TYPE_CHECKING:
    from phalanx.evaluation.convert import Converted

Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. Default: the stored dtype.")]
ShardSize = Annotated[str, typer.Option(help="Maximum size of one safetensors file, for example 5GB.")]


def export(
    checkpoint: Annotated[str, typer.Argument(help=CHECKPOINT, metavar="CKPT")],
    out: Annotated[Path, typer.Argument(help="The folder to write: a new or empty one.", metavar="HF_DIR")],
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    check: Annotated[
        Path | None,
        typer.Option(help="Logits that a run wrote at a save (hf/step-N.logits). The exported model must reproduce them."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a model for transformers: weights in safetensors, config.json and the tokenizer."""
    from phalanx.checkpointing.hf_folder import read_reference
    from phalanx.evaluation.convert import TORCH, export_checkpoint

    if dtype is not None and dtype not in TORCH:
        raise RunError(f"--dtype {dtype}: choose {', '.join(TORCH)}.")
    reference = None if check is None else read_reference(check)
    converted = export_checkpoint(checkpoint, out, dtype, parse_size("--shard-size", shard_size), reference)
    if json:
        print_json(_report(converted))
        return
    _print_notes(converted)
    files = "1 file" if converted.files == 1 else f"{converted.files} files"
    print(f"{converted.parameters:,} parameters ({converted.family}, {converted.dtype}, {files}) → {out}")
    if (match := converted.match) is not None:
        print(
            f"Loaded by {match.opened}, its logits differ by {match.difference:.2g} of the largest; {match.allowed:.2g} is allowed."
        )


def import_(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json and weights in safetensors.", metavar="HF_DIR")],
    out: Annotated[Path, typer.Argument(help="The run directory to write: a new or empty one.", metavar="OUT")],
    json: AsJson = False,
) -> None:
    """Convert a Hugging Face model into a run directory. The model is checked first, then streamed, whatever its size."""
    from phalanx.evaluation.convert import import_folder

    converted = import_folder(folder, out)
    if json:
        print_json(_report(converted))
        return
    _print_notes(converted)
    print(f"{converted.parameters:,} parameters ({converted.family}, {converted.dtype}) → {out}")
    print(f'Continue with `phalanx generate {out} "…"`, or with [model] from = "{out}" in a run file.')


def _print_notes(converted: Converted) -> None:
    for note in converted.notes:
        print(f"Note: {note}")


def _report(converted: Converted) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "path": str(converted.path),
        "family": converted.family,
        "parameters": converted.parameters,
        "bytes": converted.bytes,
        "files": converted.files,
        "dtype": converted.dtype,
        "notes": list(converted.notes),
    } | ({} if converted.match is None else asdict(converted.match))
