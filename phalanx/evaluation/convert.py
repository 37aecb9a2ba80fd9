"""Models in and out: a Hugging Face folder to a run directory with one checkpoint, and a checkpoint to such a folder.

`phalanx import` and `phalanx export` call it. Both check everything first, then stream: one block of one tensor is in memory at
a time. Both write beside their goal and rename at the end, so that nothing half-written carries its name.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from phalanx._version import __version__
from phalanx.checkpointing.find_checkpoint import find, find_unverified
from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.hf_folder import ReferenceLogits, WeightsFolder, WeightsWriter
from phalanx.checkpointing.location import atomic_directory
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.tools import offline_writer
from phalanx.evaluation import bytelevel
from phalanx.evaluation.matching import Match, check
from phalanx.evaluation.open_model import run_for, run_of, words_of
from phalanx.models import hf_mapping, hf_names
from phalanx.models.hf_mapping import Entry
from phalanx.spec import hf_config, hf_config_write
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import TOKENIZER_VOCAB, Data, Run
from phalanx.spec.tensor_slice import Box

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of weights, as a run file calls them."""
_WORDS = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
          "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"}  # fmt: skip
"""What goes along with the weights, where it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written."""

    path: Path
    family: str
    """Hugging Face's `model_type`."""
    parameters: int
    bytes: int
    files: int
    """Of weights."""
    dtype: str
    notes: tuple[str, ...]
    """What a person should know: a tokenizer that was not there, modules left out."""
    match: Match | None = None
    """How it compares with the model in training, where that was asked for."""


def import_folder(folder: Path, out: Path) -> Converted:
    """Write the folder's model as a run directory with one checkpoint, in the format its weights have."""
    if not folder.is_dir():
        raise RunError([f"{folder} is not a folder: name one with config.json and weights in safetensors."])
    spec = hf_config.model_spec(folder)
    files = WeightsFolder(folder)
    table = hf_names.match(files, spec, hf_config.interleaved(hf_config.read_config(folder)))
    notes = _notes_of_import(folder, spec)
    words = [folder / name for name in sorted(_WORDS) if (folder / name).is_file()]
    own = (folder / "tokenizer.json").is_file()
    run = run_for(spec, words_of(folder)[1] if own else Data(tokenizer="byte"), folder)
    if own:
        run = replace(run, data=replace(run.data, tokenizer=str(out.absolute() / "tokenizer")))
    progress = {"step": 0, "samples": 0, "skipped_in_a_row": 0}
    metadata = RunMetadata(progress=progress, version=__version__, run=dump(run))
    with atomic_directory(out) as unfinished:
        if words:
            (unfinished / "tokenizer").mkdir()
        for word in words:
            shutil.copyfile(word, unfinished / "tokenizer" / word.name)
        (unfinished / "run.toml").write_text(dump(run))
        offline_writer.write_checkpoint(unfinished / "checkpoints", 0, [_streamed(entry, files) for entry in table], metadata)
    read = {piece.hf_name for entry in table for piece in entry.parts}
    formats = sorted({_word(files.dtype(name)) for name in read})
    return Converted(
        path=out, family=hf_config_write.family(spec), parameters=spec.parameters(), dtype="+".join(formats), notes=notes,
        files=len({files.tensors[name].file for name in read}),
        bytes=sum(files.tensors[name].end - files.tensors[name].begin for name in read),
    )  # fmt: skip


def _streamed(entry: Entry, files: WeightsFolder) -> offline_writer.StreamedTensor:
    dtype = files.dtype(entry.parts[0].hf_name)
    chunks = [
        offline_writer.StreamedBox(box=Box(block.offsets, block.sizes), read=partial(hf_mapping.read, block, files.rows))
        for block in hf_mapping.blocks(entry, dtype.itemsize)
    ]
    return offline_writer.StreamedTensor(name=f"model/{entry.name}", shape=entry.shape, dtype=dtype, boxes=chunks)


def _notes_of_import(folder: Path, spec: ModelSpec) -> tuple[str, ...]:
    if (folder / "tokenizer.json").is_file():
        return ()
    if os.path.lexists(folder / "tokenizer.json"):
        raise RunError(
            [f"{folder / 'tokenizer.json'} is no file: it is a folder, or a link that leads nowhere. Copy it again."]
        )
    least = TOKENIZER_VOCAB["byte"]
    if spec.rows < least:
        raise RunError(
            [
                f"{folder} has no tokenizer.json, and {spec.rows} tokens are too few for the byte tokenizer ({least}): add the file."
            ]
        )
    return (f'{folder} has no tokenizer.json: the run file says "byte", whose ids mean something else to this model.',)


def export_checkpoint(
    path: Path | str,
    out: Path,
    dtype: str | None = None,
    shard_size: int = 5_000_000_000,
    reference: ReferenceLogits | None = None,
) -> Converted:
    """Write a checkpoint's model as a folder that transformers loads. `dtype`: of the weights; None: as they are stored.

    `reference`: what the folder has to say before it gets its name; RunFailed where it says something else.
    """
    found = find(path) if reference is None else find_unverified(path)  # what is read is checked; all of it was just written
    run = run_of(found)
    spec = run.model
    family = hf_config_write.family(spec)
    saved = CheckpointReader(found.checkpoint)
    table = hf_names.table(spec)
    _fits(saved, table, found.source)
    formats = {entry.name: _format(saved, entry, dtype) for entry in table}
    tensors = {piece.hf_name: (piece.shape, formats[entry.name]) for entry in table for piece in entry.parts}
    copies = hf_names.copies(spec)
    tensors |= {copy: tensors[original] for copy, original in copies.items()}
    written = _word(formats["embed.weight"])
    words, special, notes = _words(run, found.tokenizer)
    if spec.mtp_depth and family != "deepseek_v3":
        notes.append(
            f"{hf_config_write.NAMES[family]} has no multi-token prediction: the {spec.mtp_depth} modules of it are left out."
        )
    with atomic_directory(out) as unfinished:
        for name, text in words.items():
            (unfinished / name).write_bytes(text)
        config = hf_config_write.config(spec, dtype=str(TORCH[written]).removeprefix("torch."), tokens=special)
        (unfinished / hf_config.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        writer = WeightsWriter(unfinished, tensors, shard_size)
        for entry in table:
            _export(entry, saved, writer, [copy for copy, original in copies.items() if original == entry.parts[0].hf_name])
        match = None if reference is None else check(unfinished, reference)
        for file in unfinished.iterdir():
            _sync(file)
    return Converted(
        path=out, family=family, parameters=spec.parameters(), bytes=writer.bytes, files=writer.files, dtype=written,
        notes=tuple(notes), match=match,
    )  # fmt: skip


def _sync(file: Path) -> None:
    """So that it survives a crash of the machine as its name does."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _export(entry: Entry, saved: CheckpointReader, writer: WeightsWriter, copies: list[str]) -> None:
    """Read one of our tensors, part by part, and put each where theirs are."""
    name = f"model/{entry.name}"
    if entry.parts[0].expert is not None:
        for first, last in saved.row_ranges(name):
            part = saved.read(name, first, last)
            for piece in entry.parts[first:last]:
                assert piece.expert is not None
                writer.write(piece.hf_name, hf_mapping.to_hf(piece, part[piece.expert - first]))
        return
    (piece,) = entry.parts
    # Of a turned tensor, a part of ours is none of theirs.
    parts = [(0, entry.shape[0])] if piece.transposed else saved.row_ranges(name, piece.pairs[0] if piece.pairs else 1)
    for first, last in parts:
        rows = hf_mapping.to_hf(piece, saved.read(name, first, last))
        for theirs in (piece.hf_name, *copies):
            writer.write(theirs, rows, piece.rows[0] + first, None if piece.columns is None else piece.columns[0])


def _fits(saved: CheckpointReader, table: tuple[Entry, ...], source: str) -> None:
    problems = []
    for entry in table:
        found = saved.shape(f"model/{entry.name}")
        if found != entry.shape:
            has = "lacks it" if found is None else f"has {list(found)}"
            problems.append(f"{source} describes {entry.name} of shape {list(entry.shape)}; {saved.path} {has}.")
    if problems:
        raise RunError([*problems[:10], "Undo what was changed in the run file."])


def _format(saved: CheckpointReader, entry: Entry, dtype: str | None) -> torch.dtype:
    stored = saved.dtype(f"model/{entry.name}")
    return stored if dtype is None or entry.exact else TORCH[dtype]


def _words(run: Run, kept: Path | None) -> tuple[dict[str, bytes], dict[str, int | None], list[str]]:
    """The tokenizer's files by name, the ids of its special tokens as config.json has them, and what is to be said of them."""
    from phalanx.data.tokenizer import open_tokenizer

    if run.data.tokenizer == "byte":
        if run.model.rows < TOKENIZER_VOCAB["byte"]:
            return {}, {}, ["The model has fewer tokens than the byte tokenizer: none is exported."]
        # A document begins where the one before has ended.
        return bytelevel.files(run.model.context), {"bos_token_id": bytelevel.END, "eos_token_id": bytelevel.END}, []
    words = open_tokenizer(run.data.tokenizer, run.data.end_token)
    ids = {text: number for number, text in words.marks.items()}
    special: dict[str, int | None] = {f"{key}_id": ids.get(words.special.get(key, "")) for key in ("bos_token", "pad_token")}
    beside = kept.glob("*") if kept is not None else ()
    found = {file.name: file for file in words.files} | {file.name: file for file in beside if file.name in _WORDS}
    return {name: file.read_bytes() for name, file in found.items()}, special | {"eos_token_id": words.end}, []


def _word(dtype: torch.dtype) -> str:
    return next(word for word, known in TORCH.items() if known is dtype)
