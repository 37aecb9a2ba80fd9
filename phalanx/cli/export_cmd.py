"""`phalanx export`: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.output import AsJson, print_json
from phalanx.spec.errors import RunError

if TYPE_CHECKING:
    from phalanx.evaluation.convert import Converted

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a run directory for its newest.", metavar="CKPT")],
    out: Annotated[Path, typer.Argument(help="The folder to write: a new or empty one.", metavar="HF_DIR")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; left out: as the weights are stored.")] = None,
    shard_size: Annotated[str, typer.Option(help="Most bytes of one file of weights, such as 5GB.")] = "5GB",
    check: Annotated[
        Path | None,
        typer.Option(help="Logits that a run has written at a save (hf/step-N.logits): compared before the folder is done."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a model for transformers: weights in safetensors, config.json and the tokenizer."""
    from phalanx.checkpointing.hf_folder import read_reference
    from phalanx.evaluation.convert import TORCH, export_checkpoint

    if dtype is not None and dtype not in TORCH:
        raise RunError([f"--dtype {dtype}: choose {', '.join(TORCH)}."])
    reference = None if check is None else read_reference(check)
    converted = export_checkpoint(checkpoint, out, dtype, size_in_bytes(shard_size), reference)
    if json:
        print_json(report(converted))
        return
    for note in converted.notes:
        print(f"Note: {note}")
    files = "1 file" if converted.files == 1 else f"{converted.files} files"
    print(f"{converted.parameters:,} parameters ({converted.family}, {converted.dtype}, {files}) → {out}")
    if (match := converted.match) is not None:
        print(
            f"Opened by {match.opened}, its logits differ by {match.difference:.2g} of the largest; {match.allowed:.2g} is allowed."
        )


def report(converted: Converted) -> dict[str, Any]:
    """What --json prints, of import too."""
    return {
        "path": str(converted.path),
        "family": converted.family,
        "parameters": converted.parameters,
        "bytes": converted.bytes,
        "files": converted.files,
        "dtype": converted.dtype,
        "notes": list(converted.notes),
    } | ({} if converted.match is None else asdict(converted.match))


def size_in_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if size < 1:
        raise RunError([f"--shard-size {text}: give a size such as 5GB or 500MB."])
    return size
