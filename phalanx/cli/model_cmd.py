"""`phalanx eval` and `phalanx generate`: loss, perplexity or accuracy of a trained model, and text sampled from it. `phalanx chat` is in
`cli/chat_cmd`."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from phalanx.checkpointing.find_checkpoint import pin_model
from phalanx.cli.options import (
    SOURCE_KINDS,
    AsJson,
    Device,
    Field,
    MaxTokens,
    Model,
    Seed,
    Temperature,
    Template,
    TopK,
    TopP,
    check_source_kind,
)
from phalanx.cli.output import console, finish, plain_table, report_checkpoint, tracked
from phalanx.dashboard.data_tables import tokenizing
from phalanx.dashboard.numbers import count, number, percent, visible
from phalanx.data.chat_turns import chat_source
from phalanx.spec import hf_config
from phalanx.spec.errors import refuse
from phalanx.spec.hub import local_path

if TYPE_CHECKING:
    from phalanx.evaluation.conversation import Conversation
    from phalanx.evaluation.open_model import Opened
    from phalanx.evaluation.score import Measured
    from phalanx.evaluation.text_loss import TextOptions
    from phalanx.models.sampling import Sampling


def eval(
    checkpoint: Model,
    source: Annotated[
        str | None, Option(help=f"Kind of text to evaluate instead of the held-out text: {', '.join(SOURCE_KINDS)}.")
    ] = None,
    path: Annotated[list[str] | None, Option(help="Files, folders, globs or URLs to evaluate; may be repeated.")] = None,
    field: Field = None,
    split: Annotated[str | None, Option(help="hf: the split of the dataset.")] = None,
    config: Annotated[str | None, Option(help="hf: the configuration of the dataset.")] = None,
    template: Template = None,
    choices: Annotated[
        Path | None, Option(help="JSON Lines file with multiple-choice questions to evaluate instead of text.")
    ] = None,
    sequence_length: Annotated[int | None, Option(min=1, help="Window length. Default: that of the run.")] = None,
    sequences: Annotated[int | None, Option(min=1, help="Maximum number of windows per source, or of questions.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Sequences per batch. Default: as in training.")] = None,
    device: Device = None,
    max_bad_records: Annotated[int | None, Option(min=0, help="Maximum number of bad records to skip.")] = None,
    json: AsJson = False,
) -> None:
    """Evaluate a model: held-out loss and perplexity per source, or accuracy on multiple-choice questions."""
    paths = tuple(path or ())
    given = {"source": source, "paths": paths, "field": field, "split": split, "config": config, "template": template}
    settings = {key: value for key, value in given.items() if value}
    checkpoint = str(pin_model(checkpoint))
    _check_source(checkpoint, settings, choices)
    from phalanx.evaluation.open_model import open_model
    from phalanx.evaluation.text_loss import TextOptions

    options = TextOptions(
        source=settings, sequence_length=sequence_length, sequences=sequences, batch=batch, max_bad_records=max_bad_records
    )
    opened = open_model(checkpoint, device)
    used = report_checkpoint(opened.path, opened.step, opened.damaged)
    result = _loss(opened, options) if choices is None else _choices(opened, choices, options)
    finish(json, result | used)


def _check_source(checkpoint: str, source: dict[str, Any], choices: Path | None) -> None:
    problems = check_source_kind(source.get("source"))
    if source and not (source.get("source") or source.get("paths")):
        problems.append(f"--{next(iter(source))} describes a source: add --path or --source.")
    if source and choices is not None:
        problems.append("--choices and a source exclude each other: use one of them.")
    if "://" not in checkpoint and hf_config.is_folder(local_path(checkpoint)) and not source and choices is None:
        problems.append(
            f"{checkpoint} is a Hugging Face folder, which has no held-out text: name text with --path, or use --choices."
        )
    refuse(problems)


def _choices(opened: Opened, path: Path, options: TextOptions) -> dict[str, Any]:
    from phalanx.evaluation.choices import BadRecords, choose, read_questions
    from phalanx.evaluation.open_model import scorer

    limit = options.max_bad_records if options.max_bad_records is not None else opened.run.data.max_bad_records
    bad = BadRecords(path, limit)
    judge = scorer(opened, options.batch)
    chosen = choose(judge, islice(read_questions(path, bad), options.sequences), bad)
    console.print(
        f"questions {chosen.questions}, right {percent(chosen.accuracy)}, "
        f"by likelihood per character {percent(chosen.accuracy_normalized)}",
        style="bold",
    )
    for reason, times in bad.reasons.items():
        console.print(f"skipped {times} records: {reason}", style="yellow")
    for place in bad.examples:
        console.print(f"  {place}", style="dim", markup=False, soft_wrap=True)
    if chosen.truncated:
        console.print(
            f"{chosen.truncated} questions are longer than the model's context of {judge.context} tokens: "
            "their beginning was cut off.",
            style="yellow",
        )
    names = ("accuracy", "accuracy_normalized", "questions", "truncated")
    return {name: getattr(chosen, name) for name in names} | {"skipped": dict(bad.reasons)}


def _loss(opened: Opened, options: TextOptions) -> dict[str, Any]:
    from phalanx.evaluation.text_loss import text_loss

    found = text_loss(opened, options, tracked, lambda: tokenizing(console))
    for reason, times in found.skipped.items():
        console.print(f"skipped {times} records: {reason}", style="yellow")
    _show(found.sources, found.total)
    return found.total.table() | {"sources": {name: part.table() for name, part in found.sources.items()}}


def _show(measured: dict[str, Measured], whole: Measured) -> None:
    parts = measured | ({"all": whole} if len(measured) > 1 else {})
    rows = [
        (name, *map(number, (part.loss, part.perplexity, part.bits_per_byte)), count(part.tokens))
        for name, part in parts.items()
    ]
    console.print(plain_table(("source", "loss", "perplexity", "bits/byte", "tokens"), rows))


def generate(
    checkpoint: Model,
    prompt: Annotated[str, Argument(help="Text to continue, or with --chat a message to answer.")] = "",
    tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    chat: Annotated[bool, Option("--chat", help="Answer the prompt as a message, through the model's chat template.")] = False,
    system: Annotated[str | None, Option(help="--chat: the system message.")] = None,
    template: Annotated[str | None, Option(help='--chat: a Jinja file, or "plain". Default: the template of training.')] = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Sample text from a trained model."""
    prompt = os.fsencode(prompt).decode(errors="replace")  # a command line may contain bytes that are not text
    _check_chat(prompt, chat, {"system": system, "template": template})
    checkpoint = str(pin_model(checkpoint))
    from phalanx.evaluation.open_model import open_model
    from phalanx.models.sampling import Sampling

    opened = open_model(checkpoint, device)
    used = report_checkpoint(opened.path, opened.step, opened.damaged)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if chat:
        from phalanx.evaluation.conversation import Conversation

        result = _answer(Conversation(opened, template, system), prompt, tokens, sampling, stream=not json)
    else:
        result = _continue(opened, prompt, tokens, sampling, stream=not json)
    finish(json, result | used)


def _check_chat(prompt: str, chat: bool, options: dict[str, str | None]) -> None:
    problems = [
        f"--{name} is for conversations: add --chat." for name, value in options.items() if value is not None and not chat
    ]
    if chat and not prompt.strip():
        problems.append("--chat: there is no message to answer; write it behind the model.")
    refuse(problems)


def _continue(opened: Opened, prompt: str, tokens: int, sampling: Sampling, *, stream: bool) -> dict[str, object]:
    """Continues a text. `stream`: writes it to standard output."""
    from phalanx.evaluation.generated_text import sample_text

    if chat_source(opened.run.data) is not None:
        print("This model was trained on conversations: --chat asks it through its chat template.", file=sys.stderr, flush=True)

    def write(text: str) -> None:
        if stream:
            sys.stdout.write(visible(text))
            sys.stdout.flush()

    write(prompt)
    generation = sample_text(opened, prompt, tokens, sampling, write)
    write("\n")
    return {"prompt": prompt, "text": generation.text, "tokens": len(generation.tokens)}


def _answer(conversation: Conversation, question: str, tokens: int, sampling: Sampling, *, stream: bool) -> dict[str, object]:
    """Answers one message. `stream`: writes the answer to standard output."""
    for piece in conversation.ask(question, tokens, sampling):
        if stream:
            sys.stdout.write(visible(piece))
            sys.stdout.flush()
    if stream:
        sys.stdout.write("\n")
    *_, answer = conversation.messages
    return {
        "prompt": question, "text": answer["content"], "tokens": conversation.tokens, "finished": conversation.finished
    }  # fmt: skip
