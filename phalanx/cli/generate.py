"""`phalanx generate`: text from a checkpoint."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.checkpointing.find import find
from phalanx.cli.output import AsJson, print_json
from phalanx.spec.errors import RunError
from phalanx.spec.load import load


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run directory for its newest.", metavar="CKPT")],
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among this many likeliest tokens only.")] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among tokens that together have this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; left out: the GPU if there is one.")] = None,
    json: AsJson = False,
) -> None:
    """Sample text from a trained model."""
    prompt = os.fsencode(prompt).decode(errors="replace")  # a command line may hold bytes that are no text
    path, run_file = find(checkpoint)
    run = load(run_file)
    import torch
    from torch.distributed.checkpoint import CheckpointException

    from phalanx.checkpointing.load import load as load_tensors
    from phalanx.data.tokenize import tokenizer
    from phalanx.models.generate import Sampling
    from phalanx.models.generate import generate as sample
    from phalanx.models.init import build

    if device not in (None, "cpu", "cuda"):
        raise RunError([f"--device {device}: choose cpu or cuda."])
    if device == "cuda" and not torch.cuda.is_available():
        raise RunError(["--device cuda: torch sees no GPU here; leave the option out, or look at `phalanx doctor`."])
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = build(run.model).to_empty(device=where).eval()
    try:
        load_tensors(path, {f"model/{name}": p.detach() for name, p in model.named_parameters()}, alone=True)
    except CheckpointException as error:  # a size or a name that differs
        why, _ = next(iter(error.failures.values()))
        raise RunError([f"{path} does not fit the model of {run_file} ({why}): undo what was changed there."]) from None
    words = tokenizer(run.data.tokenizer)
    # A model needs something to go on from: without a prompt, the end of the document before.
    start = [int(token) for token in words.encode(prompt)] or [words.end]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    made: list[int] = []
    if not json:
        sys.stdout.write(prompt)
    for token in sample(model, start, tokens, words.end, sampling):
        made.append(token)
        if not json and token < words.end:  # the end, and what a padded vocabulary adds, are no bytes
            sys.stdout.write(decoder.decode(bytes([token])))
            sys.stdout.flush()
    if json:
        print_json({"prompt": prompt, "text": words.decode(made), "tokens": len(made), "checkpoint": str(path)})
    else:
        sys.stdout.write("\n")
