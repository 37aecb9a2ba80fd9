"""Exports behind training: what the model says on any layout, one export at a time, and what is held, skipped and removed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing.directory import step_dir
from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.events.records import Event, Exported, ExportFailed, Saved
from phalanx.models.init import build, materialize
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.training import exports as exports_module
from phalanx.training.exports import Exports, reference_logits

SAID = ReferenceLogits(torch.arange(4), torch.arange(4), torch.randn(4, 9), "fp32")
MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32")


def _asked(mesh: Mesh, path: Path, overrides: tuple[str, ...]) -> tuple[ReferenceLogits, float, float]:
    trainer = tiny_trainer(mesh, tiny_run(*overrides), path / "checkpoints")
    said = reference_logits(trainer.stepper, trainer.run, trainer.plan)
    first = trainer.step()
    trainer.close()
    plain = tiny_trainer(mesh, tiny_run(*overrides), path / "checkpoints")
    other = plain.step()
    plain.close()
    assert first is not None and other is not None
    return said, first.loss, other.loss


@pytest.mark.parametrize(
    ("ranks", "layout", "overrides"),
    [
        (1, Layout(), ("memory.loss_chunk=7",)),
        (2, Layout(tensor=2, sequence=True), ()),
        (2, Layout(context=2), ()),
        (2, Layout(shard=2, zero=3), ("memory.loss_chunk=7",)),
        (2, Layout(data=2, expert=2), MOE),
        (4, Layout(pipeline=2, tensor=2), ("model.tied=true",)),
    ],
)
def test_reference_logits_equal_one_device_on_any_layout(
    tmp_path: Path, ranks: int, layout: Layout, overrides: tuple[str, ...]
) -> None:
    """As the whole model on one device; and asking leaves no trace in the training."""
    found = run_ranks(_asked, ranks, tmp_path, overrides, layout=layout)
    run = tiny_run(*overrides)
    model = materialize(build(run.model), run.train.seed, torch.device("cpu")).eval()
    for said, asked, plain in found:
        assert len(said.tokens_S) == 16 and asked == plain
        with torch.no_grad():
            whole_SV = model(said.tokens_S[None], torch.arange(16)[None])[0]
        torch.testing.assert_close(said.logits_KV, whole_SV[said.positions_K], rtol=0, atol=2e-6)


class Gate:
    """A command that ends when it is let, with the given words."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]):
        self.begun, self.go, self.calls = threading.Semaphore(0), threading.Semaphore(0), []
        self._said = said
        monkeypatch.setattr(Exports, "_run", lambda exports, arguments: self._run(arguments))

    def _run(self, arguments: list[str]) -> dict[str, Any]:
        self.calls.append(arguments)
        self.begun.release()
        assert self.go.acquire(timeout=60)
        if "error" not in self._said:
            Path(arguments[1]).mkdir()
        return self._said


def test_exports_run_one_at_a_time_and_the_newest_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, {"difference": 1e-7})
    exports = Exports(tmp_path / "hf")
    for step in (10, 20, 30):
        exports.expect(step, SAID)
        exports.on_saved(step_dir(tmp_path / "checkpoints", step))
        if step == 10:
            assert gate.begun.acquire(timeout=60)
    assert exports.in_use == {"step-00000010", "step-00000030"}
    (skipped,) = exports.ended()
    assert isinstance(skipped, ExportFailed) and skipped.step == 20 and "step 30 was saved" in skipped.reason
    gate.go.release(2)
    done = exports.wait()
    assert [(event.step, event.difference) for event in done if isinstance(event, Exported)] == [(10, 1e-7), (30, 1e-7)]
    assert exports.in_use == set() and exports.has("step-00000030") and not exports.has("step-00000020")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {f"step-000000{step}{end}" for step in (10, 30) for end in ("", ".logits")}
    exports.on_pruned(["step-00000010"])
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"step-00000030", "step-00000030.logits"}


def test_a_failed_export_is_reported_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, {"error": "it differs"})
    (tmp_path / "hf" / "step-00000007.partial").mkdir(parents=True)
    exports = Exports(tmp_path / "hf")
    exports.expect(5, SAID)
    exports.on_saved(step_dir(tmp_path / "checkpoints", 5))
    gate.go.release()
    (failed,) = exports.wait()
    assert isinstance(failed, ExportFailed) and (failed.step, failed.reason) == (5, "it differs")
    assert list((tmp_path / "hf").iterdir()) == []


def test_a_failed_save_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, {"difference": 0.0})
    exports = Exports(tmp_path / "hf")
    exports.expect(5, SAID)  # its save failed
    exports.expect(10, SAID)
    exports.on_saved(step_dir(tmp_path / "checkpoints", 10))
    exports.on_saved(step_dir(tmp_path / "checkpoints", 5))
    gate.go.release(2)
    assert [event.step for event in exports.wait() if isinstance(event, Exported)] == [10]
    assert len(gate.calls) == 1


def _train(mesh: Mesh, path: Path, *overrides: str) -> list[Event]:
    trainer = tiny_trainer(mesh, tiny_run("checkpoint.export_hf=true", *overrides), path / "checkpoints")
    trainer.restore()
    return list(trainer.events())


def test_a_remote_checkpoint_is_not_pruned_while_it_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run whose directory was lost: what it goes on from, and still has to export, lies at the URL alone."""
    url = tmp_path / "far"
    kept = (f"checkpoint.url={url}", "checkpoint.local_first=true", "checkpoint.every=2", "checkpoint.keep_last=1")
    gate = Gate(monkeypatch, {"difference": 0.0})
    gate.go.release()
    _train(ALONE, tmp_path / "lost", *kept, "train.steps=2")
    assert gate.begun.acquire(timeout=60)
    events: list[Event] = []
    thread = threading.Thread(target=lambda: events.extend(_train(ALONE, tmp_path / "new", *kept, "train.steps=4")))
    thread.start()
    assert gate.begun.acquire(timeout=60)
    while thread.is_alive() and not (url / "step-00000004").is_dir():
        thread.join(0.01)
    thread.join(0.3)  # retention follows at once
    assert gate.calls[1][0] == str(url / "step-00000002") and (url / "step-00000002").is_dir()
    gate.go.release(2)
    thread.join()
    assert [event.step for event in events if isinstance(event, Exported)] == [2, 4]
    assert [path.name for path in url.iterdir()] == ["step-00000004"]


def test_a_checkpoint_is_not_pruned_while_it_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, {"difference": 0.0})
    events: list[Event] = []
    overrides = ("checkpoint.every=2", "checkpoint.keep_last=1", "train.steps=6")
    thread = threading.Thread(target=lambda: events.extend(_train(ALONE, tmp_path, *overrides)))
    thread.start()
    assert gate.begun.acquire(timeout=60)
    while not (tmp_path / "checkpoints" / "step-00000006").is_dir():
        thread.join(0.01)
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()
    gate.go.release(3)
    thread.join()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step-00000006", "step-00000006.logits"]
    assert [type(event).__name__ for event in events if isinstance(event, Saved | Exported | ExportFailed)][-1] == "Exported"


def test_closing_exports_kills_the_export_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it had to say is not waited for."""
    monkeypatch.setattr(exports_module.sys, "executable", str(_sleeper(tmp_path)))
    exports = Exports(tmp_path / "hf")
    exports.expect(5, SAID)
    exports.on_saved(step_dir(tmp_path / "checkpoints", 5))
    while exports._process is None:
        pass
    process = exports._process
    exports.close()
    assert process.returncode == -9
    (failed,) = exports.ended()
    assert isinstance(failed, ExportFailed) and "signal 9" in failed.reason
    assert list((tmp_path / "hf").iterdir()) == []


def _sleeper(tmp_path: Path) -> Path:
    program = tmp_path / "sleeper"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    return program


@pytest.mark.slow
def test_export_process_exports_a_bf16_run_of_two_ranks(tmp_path: Path) -> None:
    """Two ranks, bf16: by the real command."""
    overrides = ("precision.compute=bf16", "train.steps=2")
    events = run_ranks(_train, 2, tmp_path, *overrides, layout=Layout(pipeline=2))[0]
    (done,) = (event for event in events if isinstance(event, Exported | ExportFailed))
    assert isinstance(done, Exported), done
    assert done.path == str(tmp_path / "hf" / "step-00000002") and 0 < done.difference < 0.05
    assert (tmp_path / "hf" / "step-00000002" / "config.json").is_file()


def test_a_resumed_run_makes_a_missing_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, {"difference": 0.0})
    gate.go.release(2)
    _train(ALONE, tmp_path, "train.steps=2")
    exports_module._remove(tmp_path / "hf" / "step-00000002")
    for expected in (["Exported"], []):
        trainer = tiny_trainer(ALONE, tiny_run("checkpoint.export_hf=true", "train.steps=2"), tmp_path / "checkpoints")
        trainer.restore()
        again = [event for event in trainer.events() if isinstance(event, Exported | ExportFailed)]
        assert [type(event).__name__ for event in again] == expected
    assert gate.calls[0] == gate.calls[1] and len(gate.calls) == 2
