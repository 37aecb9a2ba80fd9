"""`phalanx checkpoint export`: a checkpoint as files that others read: a Hugging Face folder, plain safetensors, or one file for
torch.load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.export_cmd import export, size_in_bytes
from phalanx.cli.output import AsJson, print_json
from phalanx.dashboard.numbers import size
from phalanx.spec.errors import RunError

_FORMATS = ("hf", "safetensors", "torch")


def checkpoint_export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, or a run directory for its newest; a path or a URL.", metavar="CKPT")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, a new or empty one; for torch, a new file.", metavar="OUT")],
    kind: Annotated[str, typer.Option("--format", help=f"{', '.join(_FORMATS)}.")] = "hf",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; left out: as the weights are stored.")] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Optimizer states too; not for hf.")] = False,
    shard_size: Annotated[str, typer.Option(help="Most bytes of one safetensors file, such as 5GB.")] = "5GB",
    json: AsJson = False,
) -> None:
    """Write a checkpoint for others to read."""
    problems = []
    if kind not in _FORMATS:
        problems.append(f"--format {kind}: choose {', '.join(_FORMATS)}.")
    if kind == "hf" and optimizer:
        problems.append(
            "--optimizer: a Hugging Face folder has no place for optimizer states; add --format safetensors or torch."
        )
    if problems:
        raise RunError(problems)
    if kind == "hf":
        export(checkpoint, out, dtype, shard_size, json=json)
        return
    limit = size_in_bytes(shard_size)
    from phalanx.checkpointing.find_checkpoint import locate
    from phalanx.checkpointing.restore import CheckpointReader
    from phalanx.checkpointing.tools.plain_export import to_safetensors, to_torch
    from phalanx.evaluation.convert import TORCH

    if dtype is not None and dtype not in TORCH:
        raise RunError([f"--dtype {dtype}: choose {', '.join(TORCH)}."])
    saved = CheckpointReader(locate(checkpoint))
    format_ = None if dtype is None else TORCH[dtype]
    if kind == "torch":
        written = to_torch(saved, out, optimizer=optimizer, dtype=format_)
    else:
        written = to_safetensors(saved, out, optimizer=optimizer, dtype=format_, shard_size=limit)
    saved.close()
    if json:
        print_json(
            {
                "path": str(out), "format": kind, "tensors": written.tensors, "values": written.values, "bytes": written.bytes,
                "files": written.files, "dtypes": list(written.formats),
            }
        )  # fmt: skip
        return
    files = "1 file" if written.files == 1 else f"{written.files} files"
    print(f"{written.tensors} tensors ({'+'.join(written.formats)}, {size(written.bytes)}, {files}) → {out}")
