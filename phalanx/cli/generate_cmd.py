"""`phalanx generate`: text from a checkpoint, or from a Hugging Face folder."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from phalanx.cli.output import AsJson, print_json


def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, a run directory for its newest, or a Hugging Face folder.", metavar="CKPT")
    ],
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
    from phalanx.evaluation.open_model import open_model
    from phalanx.models.sampling import Sampling
    from phalanx.models.sampling import generate as sample

    opened = open_model(checkpoint, device)
    words = opened.tokenizer
    # A model needs something to go on from: without a prompt, the end of the document before.
    start = [int(token) for token in words.encode(prompt)] or [words.end]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    text = words.stream()
    made: list[int] = []
    if not json:
        sys.stdout.write(prompt)
    for token in sample(opened.model, start, tokens, -1, sampling):
        made.append(token)
        if not json and token != words.end:
            sys.stdout.write(text.push(token))
            sys.stdout.flush()
        if token in opened.stops:
            break
    if json:
        print_json({"prompt": prompt, "text": words.decode(made), "tokens": len(made), "checkpoint": str(opened.path)})
    else:
        sys.stdout.write("\n")
