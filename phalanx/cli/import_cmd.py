"""`phalanx import`: a Hugging Face folder as a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.output import AsJson, print_json


def import_(
    folder: Annotated[Path, typer.Argument(help="config.json with weights in safetensors.", metavar="HF_DIR")],
    out: Annotated[Path, typer.Argument(help="The run directory to write: a new or empty one.", metavar="OUT")],
    json: AsJson = False,
) -> None:
    """Bring a model from Hugging Face's format: checked first, then streamed, whatever its size."""
    from phalanx.cli.export_cmd import report
    from phalanx.evaluation.convert import import_folder

    converted = import_folder(folder, out)
    if json:
        print_json(report(converted))
        return
    for note in converted.notes:
        print(f"Note: {note}")
    print(f"{converted.parameters:,} parameters ({converted.family}, {converted.dtype}) → {out}")
    print(f'Go on with `phalanx generate {out} "…"`, or with [model] from = "{out}" in a run file.')
