"""checkpoint.export_hf end to end: trained, saved, exported, opened by transformers, trained further from there; and `kill -9`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from commands import FinishedRuns, Workshop

from phalanx.checkpointing.hf_folder import read_reference
from phalanx.events.records import Exported, ExportFailed, Step

transformers = pytest.importorskip("transformers")

FAMILIES: dict[str, list[str]] = {
    "llama": [],
    "qwen3": ["model.qk_norm=true", "model.tied=true"],
    "gpt2": ["model.norm=layer", "model.activation=gelu", "model.positions=learned", "model.bias=true", "model.kv_heads=2"],
    "mixtral": ["model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32"],
    "qwen3_moe": ["model.qk_norm=true", "model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32"],
    "deepseek_v3": ["model.preset=tiny-mla"],
}
SHARED = ["checkpoint.export_hf=true", "train.steps=4", "train.eval_every=4"]


def exports(shop: Workshop, run_dir: str) -> list[Exported | ExportFailed]:
    return [event for event in shop.events(run_dir) if isinstance(event, Exported | ExportFailed)]


def there_and_back(shop: Workshop, family: str, *overrides: str) -> None:
    if family == "deepseek_v3":
        text = shop.run_file.read_text()
        shop.run_file.write_text(text[text.index("[data]") :])
    ended = shop.train(*SHARED, *FAMILIES[family], *overrides, "--run-dir", "first")
    (done,) = exports(shop, "first")
    assert isinstance(done, Exported) and done.step == 4, ended
    out = Path(shop.path / done.path)
    assert out == shop.path / "first" / "hf" / "step-00000004"
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.config.model_type == family
    said = read_reference(Path(f"{out}.logits"))
    with torch.no_grad():
        theirs = model(input_ids=said.tokens_S[None]).logits[0, said.positions_K]
    torch.testing.assert_close(theirs, said.logits_KV, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    # From that folder training goes on: its first loss is not that of a fresh model.
    data = shop.run_file.read_text()
    (shop.path / "on.toml").write_text(f'[model]\nfrom = "{out}"\n\n' + data[data.index("[data]") :])
    ended = shop.run("train", "on.toml", "train.steps=6", "train.seed=5", "--run-dir", "second", "--json")
    assert ended.code == 0, ended
    before, after = ([event.loss for event in shop.events(name) if isinstance(event, Step)] for name in ("first", "second"))
    assert after[0] < before[0] - 0.05 and after[-1] < after[0]


@pytest.mark.slow
def test_exported_run_trains_again_with_the_same_logits(workshop: Workshop) -> None:
    there_and_back(workshop, "llama", "layout.data=2")


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES)[1:])
def test_every_family_exports_and_trains_again(workshop: Workshop, family: str) -> None:
    there_and_back(workshop, family)


@pytest.mark.slow
def test_kill_during_an_export_loses_nothing(workshop: Workshop) -> None:
    """No folder without its partial name is half-written, no process is left, and the run makes up for it."""
    started = workshop.start("train", workshop.run_file.name, *SHARED, "--run-dir", "killed", "--json")
    folder = workshop.path / "killed" / "hf"
    started.until(lambda: any(folder.glob("step-*.partial")), "an export began")
    os.kill(started.pid, signal.SIGKILL)
    started.process.wait()
    assert workshop.gone()
    assert not list(folder.glob("step-????????"))
    # The run had taken all its steps; with more to take it goes on from what it has saved.
    workshop.train(*SHARED, "train.steps=5", "--run-dir", "killed")
    done = exports(workshop, "killed")
    assert {event.step for event in done if isinstance(event, Exported)} == {4, 5}, done
    assert not list(folder.glob("*.partial"))


@pytest.mark.slow
def test_export_with_other_logits_is_discarded(workshop: Workshop) -> None:
    """Keys and values are swapped on the way to the folder, and training goes on."""
    sabotage = workshop.sabotage("")
    body = (
        "import sys\nif 'phalanx.evaluation.export_process' in sys.orig_argv:\n"
        "    from phalanx.models import hf_mapping\n    real = hf_mapping.table\n"
        "    def table(spec, *rest):\n"
        "        entries = list(real(spec, *rest))\n"
        "        if rest:  # as the folder is read again\n"
        "            return tuple(entries)\n"
        "        at = {entry.name: number for number, entry in enumerate(entries)}\n"
        "        key, value = at['blocks.0.attention.key.weight'], at['blocks.0.attention.value.weight']\n"
        "        from dataclasses import replace\n"
        "        a, b = entries[key], entries[value]\n"
        "        entries[key], entries[value] = replace(a, name=b.name), replace(b, name=a.name)\n"
        "        return tuple(entries)\n"
        "    hf_mapping.table = table\n"
    )
    (workshop.path / "sabotage" / "sitecustomize.py").write_text(body)
    ended = workshop.run("train", workshop.run_file.name, *SHARED, "--run-dir", "broken", "--json", env=sabotage)
    assert ended.code == 0, ended
    (failed,) = exports(workshop, "broken")
    assert isinstance(failed, ExportFailed) and "differs from the model in training" in failed.reason, failed
    assert not list((workshop.path / "broken" / "hf").iterdir())


def test_export_check_option_compares_logits(workshop: Workshop, finished: FinishedRuns, tmp_path: Path) -> None:
    """`phalanx export --check` with logits of another model exits with 1 and writes nothing."""
    from phalanx.checkpointing.hf_folder import ReferenceLogits

    run = finished(1)
    file = tmp_path / "said"
    ReferenceLogits(torch.arange(8), torch.arange(8), torch.randn(8, 257), "fp32").write(file)
    ended = workshop.run("export", run.path, "out", "--check", file, "--json")
    assert ended.code == 1 and "differs from the model in training" in ended.json["error"][0], ended
    assert not (workshop.path / "out").exists()
