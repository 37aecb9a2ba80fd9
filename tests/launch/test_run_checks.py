"""checkpoint.url, looked at before anything starts: what cannot take checkpoints, and what holds those of another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from object_store import ACCESS
from ranks import tiny_run

from phalanx.calibration.bench_process import plan_of, small_run
from phalanx.checkpointing.format import Marker, RunMetadata
from phalanx.checkpointing.location import open_location
from phalanx.events.log import EventLog
from phalanx.events.records import Saved
from phalanx.events.rundir import RunDir
from phalanx.host.probe import lacks_instructions
from phalanx.launch.run_checks import check_lost, check_owner, format_notices, locations, storage_problems
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run


def run_at(url: object, *more: str) -> Run:
    return tiny_run(f"checkpoint.url={url}", *more)


def test_unusable_checkpoint_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_problems(tiny_run()) == []
    assert storage_problems(run_at(tmp_path / "new" / "folder")) == []
    assert storage_problems(run_at(f"file://{tmp_path}/other")) == []
    (tmp_path / "file").write_text("")
    (problem,) = storage_problems(run_at(tmp_path / "file" / "below"))
    assert problem.startswith(f'checkpoint.url = "{tmp_path}/file/below" cannot be used (Not a directory)')
    (problem,) = storage_problems(run_at("s4://bucket"))
    assert problem.startswith('checkpoint.url = "s4://bucket" begins with s4://, which fsspec does not support')
    (problem,) = storage_problems(run_at("memory://x"))
    assert "memory of one process" in problem


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError(f"Please install {protocol}fs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    (problem,) = storage_problems(run_at("s3://bucket/run"))
    assert problem.endswith("needs a package that is not installed: pip install 'phalanx[s3]'.")
    (problem,) = storage_problems(run_at("gs://bucket/run"))
    assert problem.endswith("needs a package that is not installed: Please install gsfs.")


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    for key, value in (ACCESS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(key, value)
    (problem,) = storage_problems(run_at("s3://bucket/run"))
    assert "cannot be used (s3://bucket/run cannot be listed and written: Could not connect" in problem


def test_checkpoints_of_another_run_are_left_alone(tmp_path: Path) -> None:
    run = run_at("s3://bucket/run")
    path, saved = open_location("s3://bucket/run/step-00000002"), Marker(step=2, run=RunMetadata(run=dump(run)))
    check_owner(path, saved, run, new=True, fresh=False)
    with pytest.raises(RunError, match=r"already holds a run \(step-00000002\) and --fresh was given"):
        check_owner(path, saved, run, new=True, fresh=True)
    with pytest.raises(RunError, match=r"other settings \(train.seed: 3 → 4\): name another URL"):
        check_owner(path, saved, run_at("s3://bucket/run", "train.seed=4"), new=True, fresh=False)
    warmer = run_at("s3://bucket/run", "optimizer.learning_rate=0.5")
    with pytest.raises(RunError, match=r"optimizer.learning_rate: .* → 0.5\): add --change to continue"):
        check_owner(path, saved, warmer, new=True, fresh=False)
    check_owner(path, saved, warmer, new=True, fresh=False, change=True)
    with pytest.raises(RunError, match=r"--change does not accept train.seed: 3 → 4 in the run of checkpoint.url"):
        check_owner(path, saved, run_at("s3://bucket/run", "train.seed=4"), new=True, fresh=False, change=True)
    over = replace(saved, step=run.steps)
    with pytest.raises(RunError, match=f"has finished all its {run.steps} steps"):
        check_owner(path, over, run, new=True, fresh=False)
    check_owner(path, over, run, new=False, fresh=False)


def test_checkpoint_locations_of_a_run(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    near, far = str(rundir.checkpoints), "s3://bucket/run"
    assert [str(place) for place in locations(tiny_run(), rundir)] == [near]
    assert [str(place) for place in locations(run_at(far), rundir)] == [far]
    assert [str(place) for place in locations(run_at(far, "checkpoint.local_first=true"), rundir)] == [near, far]
    with pytest.raises(RunError, match=r"checkpoint.local_first = true uploads to checkpoint.url, which is not given"):
        tiny_run("checkpoint.local_first=true")


def test_a_run_whose_checkpoints_are_elsewhere_does_not_begin_again(tmp_path: Path) -> None:
    rundir, found = RunDir(tmp_path / "run"), [open_location(tmp_path / "new")]
    rundir.create()
    check_lost(found, rundir)  # killed before it saved for the first time
    log = EventLog(rundir.events_file)
    log.emit(Saved(step=8, path="old/step-00000008", bytes=1, seconds=1.0, stall=1.0, write_seconds=1.0, bytes_per_second=1.0))
    log.close()
    with pytest.raises(
        RunError, match=r"has saved step 8 as old/step-00000008, but there is no checkpoint in .*/new: move it there"
    ):
        check_lost(found, rundir)
    (tmp_path / "new" / "step-00000008.replaced.partial").mkdir(parents=True)  # a save killed between its two renames
    check_lost(found, rundir)
    assert (tmp_path / "new" / "step-00000008").is_dir()


def test_a_format_that_the_processor_lacks_is_reported() -> None:
    plan = plan_of(small_run((64, 1, 16, 1), "cpu", "bf16"))
    (notice,) = format_notices(plan, lambda compute: True)
    assert 'precision.compute = "bf16": this CPU has no instructions for it' in notice
    assert format_notices(plan, lambda compute: False) == format_notices(replace(plan, compute="fp32")) == []
    cpus = {
        "old": "fma avx2 avx512f",
        "new": "avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16",
        "arm": "asimd asimdhp",
        "unknown": "",
    }
    lacking = {
        name: [form for form in ("bf16", "fp16", "fp8") if lacks_instructions(form, {"flags": flags})]
        for name, flags in cpus.items()
    }
    assert lacking == {"old": ["bf16", "fp16", "fp8"], "new": ["fp8"], "arm": ["bf16", "fp8"], "unknown": ["fp8"]}
    assert not lacks_instructions("fp32", {"flags": cpus["old"]})
