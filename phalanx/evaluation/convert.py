"""Import and export: a Hugging Face folder to a run directory with one checkpoint, and a checkpoint to such a folder. Both check
everything first and then stream, with one block of one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from phalanx._version import __version__
from phalanx.checkpointing import offline_writer
from phalanx.checkpointing.find_checkpoint import HF_FOLDER, FoundCheckpoint, LocatedCheckpoint, find, pin_model
from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.hf_folder import ReferenceLogits, WeightsFolder, WeightsWriter
from phalanx.checkpointing.replicas.shm_slots import free_memory
from phalanx.data.chat_turns import GENERATION_CONFIG, stored_template
from phalanx.data.tokenizer import COMPANIONS, TEMPLATE_FILE, open_tokenizer
from phalanx.evaluation.adapters import SavedWeights, saved_weights
from phalanx.evaluation.open_model import run_for, run_of, tokenizer_of
from phalanx.models import hf_mapping
from phalanx.models.decoder import Decoder
from phalanx.models.hf_mapping import Entry
from phalanx.models.init import build, reset_buffers
from phalanx.spec import config_text, hf_config, hf_config_write
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.hub import model_folder
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import TOKENIZER_VOCAB, Data, Run
from phalanx.spec.safetensors_index import SIZES
from phalanx.spec.sources import TOKENIZER_FILE
from phalanx.training.hf_weights import open_weights
from phalanx.transforms import fp8
from phalanx.transforms.fp8_numbers import Scaling
from phalanx.transforms.precision import computing

_BYTE_END = 256
_END_TEXT = "<|end|>"
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats of weights, by their names in a run file."""
_TOKENIZER_FILES = {TOKENIZER_FILE, *COMPANIONS, "chat_template.json", GENERATION_CONFIG}
"""Files that are copied along with the weights."""
EXACT = 1e-4
"""Tolerance of fp32, as a fraction of the largest logit: sums of a few thousand terms, layer upon layer, in another order."""
TIMES = 3.0
"""Factor of the measured rounding of a coarser format: another device and another order round differently, but not more coarsely. Over
all layouts, with bf16, the largest difference was 0.8 to 1.4 times the largest rounding."""
AGREEING = 0.75
"""With experts, this fraction of the positions must agree: rounding decides between two nearly equal experts, and a token that goes to
another expert than in training differs although the weights are right."""
_ROOM = 1.5  # times the weights in fp32: what transformers needs to open them, with a margin
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of an import or export."""

    path: Path
    family: str
    """Hugging Face's `model_type`."""
    parameters: int
    bytes: int
    files: int
    """Number of weight files."""
    dtype: str
    notes: tuple[str, ...]
    """Remarks for the person: a missing tokenizer, modules that were not exported."""
    match: Match | None = None
    """The comparison with the model in training, if there was a reference."""
    source: LocatedCheckpoint | None = None
    """The checkpoint that was exported; None: an import."""


def import_folder(folder: Path, out: Path) -> Converted:
    """Write the folder's model as a run directory with one checkpoint, in the number format of its weights. A name of the Hugging Face hub
    is downloaded."""
    folder = model_folder(str(pin_model(folder, HF_FOLDER)))
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: name one with config.json and weights in safetensors.")
    files, spec, table = open_weights(folder)
    notes = _notes_of_import(folder, spec)
    tokenizer_files = [folder / name for name in sorted(_TOKENIZER_FILES) if (folder / name).is_file()]
    has_tokenizer = (folder / "tokenizer.json").is_file()
    run = run_for(spec, tokenizer_of(folder)[1] if has_tokenizer else Data(tokenizer="byte"), folder)
    if has_tokenizer:
        run = replace(run, data=replace(run.data, tokenizer=str(out.absolute() / "tokenizer")))
    metadata = RunMetadata(progress={"step": 0, "samples": 0, "skipped_in_a_row": 0}, version=__version__, run=dump(run))
    with offline_writer.atomic_directory(out) as unfinished:
        if tokenizer_files:
            (unfinished / "tokenizer").mkdir()
        for file in tokenizer_files:
            shutil.copyfile(file, unfinished / "tokenizer" / file.name)
        (unfinished / "run.toml").write_text(dump(run))
        offline_writer.write_checkpoint(unfinished / "checkpoints", 0, [_streamed(entry, files) for entry in table], metadata)
    read = {part.hf_name for entry in table for part in entry.parts}
    formats = sorted({_format_name(files.dtype(name)) for name in read})
    return Converted(
        path=out, family=hf_config_write.family(spec), parameters=spec.parameters(), dtype="+".join(formats), notes=notes,
        files=len({files.tensors[name].file for name in read}),
        bytes=sum(files.tensors[name].end - files.tensors[name].begin for name in read),
    )  # fmt: skip


def _streamed(entry: Entry, files: WeightsFolder) -> offline_writer.StreamedTensor:
    dtype = files.dtype(entry.parts[0].hf_name)
    blocks = hf_mapping.blocks(entry, dtype.itemsize)
    boxes = [(block.box, partial(hf_mapping.read, block, files.rows)) for block in blocks]
    return offline_writer.StreamedTensor(name=f"model/{entry.name}", shape=entry.shape, dtype=dtype, boxes=boxes)


def _notes_of_import(folder: Path, spec: ModelSpec) -> tuple[str, ...]:
    if (folder / "tokenizer.json").is_file():
        return ()
    if os.path.lexists(folder / "tokenizer.json"):
        raise RunError(f"{folder / 'tokenizer.json'} is not a file: it is a folder or a broken link. Copy it again.")
    least = TOKENIZER_VOCAB["byte"]
    if spec.rows < least:
        raise RunError(
            f"{folder} has no tokenizer.json, and {spec.rows} tokens are too few for the byte tokenizer ({least}): add the file."
        )
    return (
        f"{folder} has no tokenizer.json: the run file names the byte tokenizer, whose ids mean something else to this model.",
    )


def export_checkpoint(
    path: Path | str,
    out: Path,
    dtype: str | None = None,
    shard_size: int = 5_000_000_000,
    reference: ReferenceLogits | None = None,
) -> Converted:
    """Write a checkpoint's model as a folder that transformers loads. `dtype`: number format of the weights; None: as stored.
    `reference`: logits that the folder must reproduce before it gets its final name; raises RunFailed if it does not."""
    found = find(path, verify=reference is None)  # with a reference it was just written, and reading verifies checksums
    run = run_of(found)
    spec = run.model
    family = hf_config_write.family(spec)
    saved = saved_weights(found, run)
    table = hf_mapping.table(spec)
    _fits(saved, table, found)
    formats = {entry.name: _format(saved, entry, dtype) for entry in table}
    tensors = {part.hf_name: (part.shape, formats[entry.name]) for entry in table for part in entry.parts}
    copies = hf_mapping.copies(spec)
    tensors |= {copy: tensors[original] for copy, original in copies.items()}
    written = _format_name(formats[table[0].name])
    tokenizer_files, special, notes = _tokenizer_files(run, found.tokenizer)
    if spec.mtp_depth and family != "deepseek_v3":
        notes.append(
            f"{hf_config_write.NAMES[family]} has no multi-token prediction: its {spec.mtp_depth} modules are not exported."
        )
    with offline_writer.atomic_directory(out) as unfinished:
        for name, text in tokenizer_files.items():
            (unfinished / name).write_bytes(text)
        config = hf_config_write.config(spec, dtype=str(TORCH[written]).removeprefix("torch."), tokens=special)
        (unfinished / hf_config.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        writer = WeightsWriter(unfinished, tensors, shard_size)
        for entry in table:
            _export(entry, saved, writer, [copy for copy, original in copies.items() if original == entry.parts[0].hf_name])
        match = None if reference is None else check(unfinished, reference)
        for path in unfinished.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # an export that has its final name survives a crash of the machine
    return Converted(
        path=out, family=family, parameters=spec.parameters(), bytes=writer.bytes, files=writer.files, dtype=written,
        notes=tuple(notes), match=match, source=LocatedCheckpoint(found.checkpoint, found.damaged),
    )  # fmt: skip


def _export(entry: Entry, saved: SavedWeights, writer: WeightsWriter, copies: list[str]) -> None:
    """Read one of our tensors piece by piece and write it to the Hugging Face tensors."""
    name = f"model/{entry.name}"
    if entry.parts[0].expert is not None:
        for first, last in saved.row_ranges(name):
            values = saved.read(name, first, last)
            for part in entry.parts[first:last]:
                assert part.expert is not None
                writer.write(part.hf_name, hf_mapping.to_hf(part, values[part.expert - first]), part.rows[0])
        return
    (part,) = entry.parts
    # Rows of a transposed tensor are columns of theirs, so that it is converted whole.
    ranges = [(0, entry.shape[0])] if part.transposed else saved.row_ranges(name, part.pairs[0] if part.pairs else 1)
    for first, last in ranges:
        rows = hf_mapping.to_hf(part, saved.read(name, first, last))
        for hf_name in (part.hf_name, *copies):
            writer.write(hf_name, rows, part.rows[0] + first, None if part.columns is None else part.columns[0])


def _fits(saved: SavedWeights, table: tuple[Entry, ...], found: FoundCheckpoint) -> None:
    problems = []
    for entry in table:
        shape = saved.shape(f"model/{entry.name}")
        if shape != entry.shape:
            has = "lacks it" if shape is None else f"has {list(shape)}"
            problems.append(f"{found.source} describes {entry.name} of shape {list(entry.shape)}; {found.checkpoint} {has}.")
    if problems:
        raise RunError([*problems[:10], "Undo the changes in the run file."])


def _format(saved: SavedWeights, entry: Entry, dtype: str | None) -> torch.dtype:
    stored = saved.dtype(f"model/{entry.name}")
    return stored if dtype is None or entry.exact else TORCH[dtype]


def _tokenizer_files(run: Run, saved: Path | None) -> tuple[dict[str, bytes], dict[str, int | None], list[str]]:
    """The tokenizer's files by name, its special token ids for config.json, and remarks. `saved`: the run directory's copy."""
    if run.data.tokenizer == "byte":
        if run.model.rows < TOKENIZER_VOCAB["byte"]:
            return {}, {}, ["The model has fewer tokens than the byte tokenizer: none is exported."]
        files = _byte_tokenizer(run.model.context)
        if (template := stored_template(saved)) is not None:
            files[TEMPLATE_FILE] = template.encode()
        # The end token of a document also begins the next one.
        return files, {"bos_token_id": _BYTE_END, "eos_token_id": _BYTE_END}, []
    tokenizer = open_tokenizer(run.data.tokenizer, run.data.end_token)
    ids = {text: number for number, text in tokenizer.marks.items()}
    special = {f"{key}_id": ids.get(tokenizer.special.get(key, "")) for key in ("bos_token", "pad_token")}
    copied = [file for file in saved.glob("*") if file.name in _TOKENIZER_FILES] if saved is not None else []
    files = {file.name: file.read_bytes() for file in (*tokenizer.files, *copied)}
    return files, special | {"eos_token_id": tokenizer.end}, []


def _format_name(dtype: torch.dtype) -> str:
    return next(name for name, known in TORCH.items() if known is dtype)


def _byte_tokenizer(context: int) -> dict[str, bytes]:
    """The byte tokenizer as tokenizer.json and tokenizer_config.json for transformers: one token per byte and one for the end."""
    library = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_alphabet())}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(_END_TEXT, normalized=False)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": _END_TEXT,
        "eos_token": _END_TEXT,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # the name of the end token inside a text is plain text, as in our tokenizer
    }
    return {
        TOKENIZER_FILE: library.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }


def _alphabet() -> list[str]:
    """A printable character for every byte, as in GPT-2: itself if printable, otherwise one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The result of a comparison. A difference is the largest of a position's logits, as a fraction of the largest logit of all."""

    opened: str
    """What opened the folder: "transformers" or "phalanx"."""
    difference: float
    """Difference at the deciding position: the worst, or with experts the worst of those that must agree."""
    allowed: float
    position: int
    """The deciding position in the prompt."""
    token: int
    """The token whose logit differs most there."""


def check(folder: Path, reference: ReferenceLogits) -> Match:
    """Compare; raises RunFailed with the position and size of the difference if they do not agree."""
    match = compare(folder, reference)
    if not match.difference <= match.allowed:  # also if a number is not finite
        raise RunFailed(
            f"opened by {match.opened} it differs from the model in training: at position {match.position} of the fixed prompt the "
            f"logit of token {match.token} by {match.difference:.3g} of the largest logit, where {reference.compute} allows "
            f"{match.allowed:.3g}"
        )
    return match


@torch.no_grad()
def compare(folder: Path, reference: ReferenceLogits) -> Match:
    """Compares the logits of one prompt: those of the model in training with the folder's on one CPU in fp32, opened by transformers if
    it is installed. For fp32 the tolerance is a bound on the rounding of sums in another order. For other formats it is measured: our
    own one-device model, filled from the folder block by block, computes the prompt in fp32 and in that format."""
    exact_KV, rounded_KV = _ours(folder, reference)
    opened, answer_KV = "phalanx", exact_KV
    if find_spec("transformers") is not None and _has_memory(folder):
        opened, answer_KV = "transformers", _theirs(folder, reference)
    if answer_KV.shape != reference.logits_KV.shape:
        raise RunFailed(
            f"opened by {opened} it has {answer_KV.shape[1]} logits, and the model in training has {reference.logits_KV.shape[1]}"
        )
    scale = answer_KV.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    worst_K, tokens_K = ((reference.logits_KV - answer_KV).abs() / scale).nan_to_num(torch.inf).max(1)
    rounding_K = ((rounded_KV - exact_KV).abs() / scale).amax(1)
    decisive = math.ceil((AGREEING if _has_experts(folder) else 1.0) * len(worst_K)) - 1
    place = int(worst_K.argsort()[decisive])
    return Match(
        opened=opened,
        difference=float(worst_K[place]),
        # At the same rank among the positions, so that an outlier counts as little.
        allowed=max(EXACT, TIMES * float(rounding_K.sort().values[decisive])),
        position=int(reference.positions_K[place]),
        token=int(tokens_K[place]),
    )


def _ours(folder: Path, reference: ReferenceLogits) -> tuple[Tensor, Tensor]:
    """The logits of our own model with the folder's weights, in fp32 and in the format of the reference."""
    files, spec, table = open_weights(folder)
    model = build(spec)
    exact = rounded = reference.tokens_S[None]
    positions = torch.arange(exact.shape[1])[None]
    if not isinstance(model, Decoder):
        return _of_transformers(model, table, files, reference)
    for index in range(spec.layers):
        part = model.part(index, index + 1).eval().to_empty(device=_CPU)
        reset_buffers(part)
        state = {name: tensor for name, tensor in part.state_dict().items() if isinstance(tensor, Tensor)}
        hf_mapping.fill(state, tuple(entry for entry in table if entry.name in state), files.rows)
        exact = part(exact, positions)
        if reference.compute != "fp32":
            if reference.compute == "fp8":
                scaling: Scaling = "row" if reference.scaling == "row" else "tensor"
                fp8.apply([part], scaling, _CPU, reference.fp8_blocks, experts=reference.fp8_experts)
            with computing(reference.compute, _CPU):
                rounded = part(rounded, positions)
        part.to_empty(device=torch.device("meta"))  # frees the block's memory
    exact_KV = exact[0, reference.positions_K].float()
    return exact_KV, exact_KV if reference.compute == "fp32" else rounded[0, reference.positions_K].float()


def _of_transformers(
    model: Any, table: tuple[Entry, ...], files: WeightsFolder, reference: ReferenceLogits
) -> tuple[Tensor, Tensor]:
    """The same of a model of transformers, whose layers are not known apart: all of it at once."""
    model.to_empty(device=_CPU).eval()
    reset_buffers(model)
    hf_mapping.fill(dict(model.state_dict()), table, files.rows)
    tokens = reference.tokens_S[None]
    positions = torch.arange(tokens.shape[1])[None]
    exact_KV = model(tokens, positions)[0, reference.positions_K].float()
    if reference.compute == "fp32":
        return exact_KV, exact_KV
    with computing(reference.compute, _CPU):
        return exact_KV, model(tokens, positions)[0, reference.positions_K].float()


def _has_experts(folder: Path) -> bool:
    spec = config_text.model_of(folder)
    return spec.moe is not None or (spec.config is not None and '_experts"' in spec.config)


def _theirs(folder: Path, reference: ReferenceLogits) -> Tensor:
    """The logits of transformers, in fp32."""
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
        logits_SV: Tensor = model(input_ids=reference.tokens_S[None]).logits[0]
    except Exception as error:  # versions of transformers raise different errors
        raise RunFailed(f"transformers {transformers.__version__} cannot open it: {error}") from error
    return logits_SV[reference.positions_K].float()


def _has_memory(folder: Path) -> bool:
    """Whether transformers, which loads the whole model, has enough memory next to training."""
    values = sum((tensor.end - tensor.begin) // SIZES[tensor.dtype] for tensor in WeightsFolder(folder).tensors.values())
    try:
        return _ROOM * 4 * values < free_memory()
    except OSError:  # not every system has /proc
        return True
