"""Identifies the weights below LoRA adapters, which a checkpoint of adapters does not contain: it holds their digest instead, and is refused
with others. Training, the checks before the start, and everything that opens a checkpoint compare it. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from phalanx.checkpointing import directory
from phalanx.checkpointing.find_checkpoint import find
from phalanx.spec import hf_config, safetensors_index
from phalanx.spec.errors import RunError, toml
from phalanx.spec.origin import origin_folder

_SAMPLE = 4096  # bytes at the beginning, in the middle and at the end of every tensor


def base_digest(source: str | None) -> str | None:
    """A digest of the weights that `model.from` names; None without it, where weights follow from the seed.

    Of a folder of safetensors it covers the name, format, shape and 12 KiB of every tensor, because hundreds of gigabytes could not be read
    at every start; of a checkpoint, the checksums of all its files.
    """
    if source is None:
        return None
    folder, digest = origin_folder(source), hashlib.blake2b(digest_size=16)
    if hf_config.is_folder(folder):
        for name, tensor in sorted(safetensors_index.stored(folder).items()):
            digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
            size = tensor.end - tensor.begin
            with tensor.file.open("rb") as stream:
                for offset in sorted({0, max(0, (size - _SAMPLE) // 2), max(0, size - _SAMPLE)}):
                    stream.seek(tensor.begin + offset)
                    digest.update(stream.read(min(_SAMPLE, size - offset)))
    else:
        marker = directory.read_marker(find(folder, verify=False).checkpoint)
        files = sorted((name, record.bytes, record.checksum) for name, record in marker.files.items())
        digest.update(json.dumps(files).encode())
    return digest.hexdigest()


def check_base(source: str | None, saved: str | None, checkpoint: object) -> None:
    """Raise RunError unless the weights that `model.from` names are those that a checkpoint's adapters were trained on. `saved`: the digest in
    the checkpoint; None: it names none."""
    if source is None or saved is None:
        return
    folder = origin_folder(source)
    if not Path(folder).is_dir():
        raise RunError(
            f"{checkpoint} holds LoRA adapters of model.from = {toml(source)}, which is not there, taken from {Path.cwd()}: "
            "put the folder back, or correct the path in the run file."
        )
    if base_digest(source) != saved:
        raise RunError(
            f"{checkpoint} holds LoRA adapters of other weights than model.from = {toml(source)} has now: restore that folder, or name a "
            "copy of the weights that the adapters were trained on."
        )
