"""`phalanx generate`: samples text from a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from phalanx.cli.options import AsJson, Device
from phalanx.cli.output import print_json


def generate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, a run directory for its newest checkpoint, or a Hugging Face folder.", metavar="CKPT"
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample only from this many most likely tokens.")] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample only from the most likely tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Sample text from a trained model."""
    prompt = os.fsencode(prompt).decode(errors="replace")  # a command line may contain bytes that are not text
    from phalanx.evaluation.open_model import open_model
    from phalanx.models.sampling import Sampling
    from phalanx.models.sampling import generate as sample

    opened = open_model(checkpoint, device)
    tokenizer = opened.tokenizer
    # Without a prompt, the model continues the end of a previous document.
    start = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    text = tokenizer.stream()
    generated: list[int] = []
    if not json:
        sys.stdout.write(prompt)
    for token in sample(opened.model, start, tokens, -1, sampling):
        generated.append(token)
        if not json and token != tokenizer.end:
            sys.stdout.write(text.push(token))
            sys.stdout.flush()
        if token in opened.stops:
            break
    if json:
        print_json(
            {"prompt": prompt, "text": tokenizer.decode(generated), "tokens": len(generated), "checkpoint": str(opened.path)}
        )
    else:
        sys.stdout.write("\n")
