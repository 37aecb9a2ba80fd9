"""`phalanx import`, `export` and `generate` on Hugging Face folders: the real commands, and their memory."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import InProcess, escaped
from hf_models import SIX, save

transformers = pytest.importorskip("transformers")


@pytest.fixture
def phalanx(here: InProcess) -> InProcess:
    return here


@pytest.mark.parametrize("family", SIX)
def test_import_and_export_keep_the_greedy_text(tmp_path: Path, phalanx: InProcess, family: str) -> None:
    """Theirs, ours straight from the folder, ours after import, theirs after export."""
    theirs = save(tmp_path / "hf", family)
    prompt = "the quick brown"

    def greedy(model: Any, folder: Path) -> str:
        words = transformers.AutoTokenizer.from_pretrained(folder)
        ids = words(prompt, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
        return str(words.decode(made, skip_special_tokens=True))

    expected = greedy(theirs, tmp_path / "hf")
    done = phalanx("import", "hf", "run", "--json")
    assert done.code == 0, done.err
    assert done.json["parameters"] == theirs.num_parameters() and done.json["notes"] == []
    for path in ("hf", "run"):
        made = phalanx("generate", path, prompt, "--tokens", 20, "--temperature", 0, "--device", "cpu", "--json")
        assert (made.code, made.json["text"]) == (0, expected), path
    plain = phalanx("generate", "run", prompt, "--tokens", 20, "--temperature", 0, "--device", "cpu")
    # What is printed as it comes leaves out a character that the text ends in the middle of.
    assert plain.out.removesuffix("\n").startswith(escaped((prompt + expected).rstrip("\ufffd")[:40]))
    done = phalanx("export", "run", "out", "--shard-size", "100kB", "--json")
    assert done.code == 0 and done.json["files"] > 1, done.err
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert greedy(back, tmp_path / "out") == expected


def test_import_and_export_print_a_summary(tmp_path: Path, phalanx: InProcess) -> None:
    save(tmp_path / "hf", "llama")
    done = phalanx("import", "hf", "run")
    assert "parameters (llama, fp32) → run" in done.shown and '[model] from = "run"' in done.shown
    done = phalanx("export", "run", "out", "--dtype", "bf16")
    assert "(llama, bf16, 1 file) → out" in done.shown
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "nowhere", "run"], "nowhere is not a directory"),
        (["import", "hf", "hf"], "hf already exists"),
        (["import", "empty", "run"], "empty is not a Hugging Face model: it has no config.json"),
        (["export", "nowhere", "out"], "nowhere is not a directory"),
        (["export", "hf", "out"], "has no checkpoint"),
        (["export", "hf", "out", "--dtype", "int8"], "--dtype int8"),
        (["export", "hf", "out", "--shard-size", "many"], '--shard-size "many" is not an amount'),
        (["generate", "empty"], "empty has no checkpoint to load"),
        (["generate", "hf", "--device", "tpu"], "--device tpu"),
    ],
)
def test_import_and_export_refuse_mistakes(tmp_path: Path, phalanx: InProcess, arguments: list[str], said: str) -> None:
    save(tmp_path / "hf", "llama")
    (tmp_path / "empty").mkdir()
    done = phalanx(*arguments)
    assert done.code == 2 and said in done.err, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf"]


BIG = """
import json, sys, torch
from pathlib import Path
from phalanx.checkpointing.hf_folder import WeightsWriter
from phalanx.models import hf_mapping
from phalanx.spec import hf_config_write
from phalanx.spec.model import ModelSpec, Moe

folder = Path(sys.argv[1]).absolute()
moe = Moe(experts=8, active=2, ffn=int(sys.argv[3]))
spec = ModelSpec(vocab=int(sys.argv[2]), dim=1024, layers=int(sys.argv[4]), heads=16, kv_heads=4, moe=moe, ffn=moe.ffn, context=64)
tensors = {piece.hf_name: (piece.shape, torch.bfloat16) for entry in hf_mapping.table(spec) for piece in entry.parts}
folder.mkdir()
writer = WeightsWriter(folder, tensors, 500_000_000)
for name, (shape, _) in tensors.items():
    for row in range(0, torch.Size(shape).numel() // shape[-1] if len(shape) > 1 else 1, 1024):
        rows = min(1024, shape[0] - row) if len(shape) > 1 else shape[0]
        writer.write(name, torch.full((rows, shape[-1] if len(shape) > 1 else 1), float(row % 97)), row)
(folder / "config.json").write_text(json.dumps(hf_config_write.config(spec, dtype="bfloat16")))
print(writer.bytes)
"""
MEASURED = """
import resource, runpy, sys
sys.argv = ["phalanx", *sys.argv[1:]]
try:
    runpy.run_module("phalanx", run_name="__main__")
except SystemExit as leaving:
    assert leaving.code in (0, None), leaving.code
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
GROWTH = """
import resource
from phalanx.evaluation.convert import import_folder
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import_folder(folder, folder.with_name("run"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def program(tmp_path: Path, text: str, *arguments: object) -> list[int]:
    """The numbers that a process of its own prints, one to a line."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines() if line.isdigit()]


def test_export_memory_is_independent_of_the_model_size(tmp_path: Path) -> None:
    size, growth = program(tmp_path, BIG + GROWTH, "hf", 60_000, 1024, 3)
    assert size > 250_000_000
    assert growth < 150_000_000


@pytest.mark.slow
def test_importing_two_gigabytes_takes_less_than_700_megabytes(tmp_path: Path) -> None:
    (size,) = program(tmp_path, BIG, "hf", 200_000, 2048, 16)
    assert size > 2_000_000_000
    assert program(tmp_path, MEASURED, "import", "hf", "run", "--json")[-1] < 700_000_000
    assert program(tmp_path, MEASURED, "export", "run", "out", "--shard-size", "500MB", "--json")[-1] < 700_000_000
    shards = sorted(path.name for path in (tmp_path / "hf").glob("model*"))
    assert len(shards) > 4
    same, different, unreadable = filecmp.cmpfiles(tmp_path / "hf", tmp_path / "out", shards, shallow=False)
    assert (same, different, unreadable) == (shards, [], [])
