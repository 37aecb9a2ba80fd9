"""What is checked, said and laid down before anything is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hf_models
import pytest
from ranks import ALONE, tiny_run, tiny_trainer

from phalanx.dashboard.progress import event_line
from phalanx.events.log import EventLog
from phalanx.events.records import DataOpened, Step
from phalanx.launch.job import first_events
from phalanx.launch.prepare import Prepared, Request, prepare
from phalanx.launch.run_checks import data_notices, space_problems, storage_problems, too_little_data
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run

TEXT = """
[model]
dim = 32
heads = 2
layers = 1
[data]
paths = ["text"]
eval_fraction = 0.1
[train]
batch = 8
sequence_length = 32
steps = 4
[cluster]
device = "cpu"
cpu_ranks = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("rank and file " * 500)
    yield tmp_path


def prepared(run: Run, request: Request | None = None) -> Prepared:
    """Prepared, and the directory given back."""
    found = prepare(run, "any", request)
    found.rundir.release()
    return found


def refused(run: Run, request: Request | None = None) -> str:
    with pytest.raises(RunError) as caught:
        prepare(run, "any", request)
    (sentence,) = caught.value.problems
    return sentence


def test_changed_text_is_refused_unless_it_is_accepted(folder: Path) -> None:
    run = loads(TEXT)
    first = prepared(run)
    assert (first.resumes, first.notices) == (False, ())
    trainer = tiny_trainer(ALONE, replace(run, train=replace(run.train, micro_batch=8)), first.rundir.checkpoints)
    list(trainer.events())
    assert prepared(run).resumes
    (folder / "text" / "two.txt").write_text("another text " * 500)
    sentence = refused(run)
    for part in ('data.source = "text"', "step-00000004", "--accept-changed-data", "--fresh", "--run-dir"):
        assert part in sentence
    again = prepared(run, Request(accept_changed_data=True))
    assert again.resumes and again.rundir.path == first.rundir.path
    assert len(again.notices) == 1 and "has changed since" in again.notices[0]
    assert not prepared(run, Request(fresh=True)).resumes


@pytest.mark.parametrize(("epochs", "enough"), [(1.0, False), (1000.0, True)])
def test_a_run_longer_than_its_epochs_is_refused(epochs: float, enough: bool, folder: Path) -> None:
    run = loads(TEXT, overrides=[f"data.epochs={epochs}", "train.steps=60"])
    if enough:
        prepared(run)
        return
    sentence = refused(run)
    windows = (7000 - 700) // 32  # nine tenths of the text
    for part in ("data.epochs = 1", "60 steps of 8 need 480", f"at most {windows // 8},"):
        assert part in sentence, sentence
    assert not (folder / "runs").exists()


def test_a_mixture_that_runs_out_names_its_sources(folder: Path) -> None:
    text = TEXT.replace('paths = ["text"]', "")
    mix = [f"data.mix.{name}.{key}" for name in "ab" for key in ('paths=["text"]', "epochs=0.5")]
    sentence = refused(loads(text, overrides=[*mix, "train.steps=60"]))
    for part in ("data.mix.a.epochs = 0.5 and data.mix.b.epochs = 0.5", "[data.mix.a], [data.mix.b]", "need 480"):
        assert part in sentence, sentence


def test_records_left_out_and_padding_are_said(folder: Path) -> None:
    lines = [json.dumps({"text": "words and " * (5 + n % 7)}) for n in range(200)]
    (folder / "records.jsonl").write_text(
        "\n".join([*lines, "{broken", json.dumps({"body": "elsewhere"}), "[also broken"]) + "\n"
    )
    run = loads(
        TEXT.replace('paths = ["text"]', 'paths = ["records.jsonl"]\npacking = "best-fit"\ncache = "cache"\nprocesses = 1'),
        overrides=["train.sequence_length=128"],
    )
    skipped, packing = prepared(run).notices
    assert skipped.startswith("3 records of jsonl were skipped: ")
    assert packing.startswith("Packing fills ") and " % of the windows" in packing


def test_text_that_is_read_as_it_lies_gives_no_notice(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    assert data_notices(trainer.data) == []
    assert too_little_data(trainer.run, trainer.data) == []


def test_the_tokenizer_is_kept_with_the_run(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"<end>": 0, "rank": 1, "and": 2, "file": 3, "?": 4}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "words").mkdir()
    made.save(str(folder / "words" / "tokenizer.json"))
    settings = ["data.tokenizer=words", "data.end_token=<end>", "data.cache=cache", "data.processes=1"]
    found = prepared(loads(TEXT, overrides=settings))
    kept = found.rundir.tokenizer / "tokenizer.json"
    assert kept.read_bytes() == (folder / "words" / "tokenizer.json").read_bytes()
    assert [path.name for path in found.rundir.tokenizer.iterdir() if path.suffix == ".partial"] == []
    assert not prepared(loads(TEXT), Request(fresh=True)).rundir.tokenizer.exists(), "the byte tokenizer has no files"


def test_weights_to_begin_with_must_be_there_and_only_then(folder: Path) -> None:
    run = loads(TEXT)
    gone = replace(run, model=replace(run.model, from_="gone"))
    sentence = refused(gone)
    assert 'model.from = "gone"' in sentence and str(folder) in sentence
    (folder / "gone" / "checkpoints").mkdir(parents=True)
    (folder / "gone" / "run.toml").write_text(dump(run))
    assert "no checkpoint to load" in refused(gone)
    trainer = tiny_trainer(ALONE, replace(run, train=replace(run.train, micro_batch=8)), folder / "gone" / "checkpoints")
    trainer.save()
    trainer.close()
    prepared(gone)


def test_a_hugging_face_folder_that_cannot_be_read_is_refused_before_anything_starts(folder: Path) -> None:
    hf_models.make("llama").save_pretrained("hf")
    run = loads(TEXT.replace("dim = 32\nheads = 2\nlayers = 1", 'from = "hf"'))
    prepared(run, Request(fresh=True))
    config = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(RunError, match=r"model\.layers\.2"):
        prepare(run, "any", Request(fresh=True))
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    weights = folder / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors was cut short" in refused(run, Request(fresh=True))


def test_imported_weights_are_no_run_to_go_on_with(folder: Path) -> None:
    run = loads(TEXT)
    first = prepared(run)
    trainer = tiny_trainer(ALONE, replace(run, train=replace(run.train, micro_batch=8)), first.rundir.checkpoints)
    trainer.data.fingerprint = None  # what `phalanx import` writes: weights that were trained on no text of ours
    trainer.save()
    trainer.close()
    for request in (Request(directory=first.rundir.path), Request(directory=first.rundir.path, accept_changed_data=True)):
        sentence = refused(run, request)
        assert "imported weights" in sentence and f'model.from = "{first.rundir.path}"' in sentence
    assert prepared(run).rundir.path == first.rundir.path.with_name("any-2")


def test_a_folder_of_checkpoints_that_cannot_be_written_is_told_before_the_first_save(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "checkpoints").symlink_to("/proc/self/task")  # root may write anywhere else
    sentence = refused(loads(TEXT), Request(directory=folder / "mine"))
    assert f"The run directory {folder / 'mine'} cannot be written" in sentence
    assert f"{folder / 'mine' / 'checkpoints'}" in sentence and "--run-dir" in sentence


def test_a_folder_for_optimizer_states_must_take_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offloaded(path: object) -> Run:
        return loads(TEXT, overrides=("memory.offload=nvme", f"memory.offload_path={path}"))

    assert refused(offloaded(folder / "text" / "one.txt")) == (
        f'memory.offload_path = "{folder}/text/one.txt" cannot be written (File exists): name a folder on a fast local disk, or remove '
        "the key."
    )
    assert "/proc/nowhere" in refused(offloaded("/proc/nowhere"))
    prepared(offloaded(folder / "states"))
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr("phalanx.launch.run_checks.shutil.disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(RunError, match="has 0 MiB free, but the optimizer states and master weights"):
        prepare(offloaded(folder / "states"), "any")


def test_a_run_planned_for_other_machines_is_not_begun(folder: Path) -> None:
    elsewhere = TEXT.partition("[cluster]")[0]
    said = refused(loads(elsewhere + '[cluster]\nname = "h100-16384"\n'))
    assert "planned for 16,384 × h100-sxm" in said and "phalanx simulate" in said
    said = refused(loads(elsewhere + '[cluster]\ngpu = "h100-smx"\n'))
    assert 'cluster.gpu = "h100-smx" is not a GPU of the catalogue: did you mean h100-sxm' in said
    assert not (folder / "runs").exists()


def take_a_step(found: Prepared) -> None:
    """As the run in this directory would record it."""
    trainer = tiny_trainer(ALONE, replace(found.run, train=replace(found.run.train, micro_batch=8)), found.rundir.checkpoints)
    log = EventLog(found.rundir.events_file)
    for event in trainer.events():
        log.emit(event)
        if isinstance(event, Step):
            trainer.stop("SIGTERM")
    log.close()


def test_a_run_without_checkpoints_has_a_directory_of_its_own(folder: Path) -> None:
    run, unsaved = loads(TEXT), loads(TEXT, overrides=["checkpoint.save=false"])
    first = prepared(unsaved)
    assert not first.resumes and any("nothing is saved" in notice for notice in first.notices)
    assert prepared(unsaved).rundir.path == first.rundir.path, "nothing has happened there"
    take_a_step(first)
    second = prepared(run)
    assert (str(first.rundir.path), str(second.rundir.path)) == ("runs/any", "runs/any-2") and not second.resumes
    take_a_step(second)
    assert prepared(run).resumes, "the one that saves"
    assert str(prepared(unsaved).rundir.path) == "runs/any-3"
    for wanted in (run, unsaved):
        sentence = refused(wanted, Request(directory=Path("runs/any")))
        assert "--run-dir runs/any holds a run that saved nothing (checkpoint.save = false) and cannot be resumed" in sentence
        assert "name another directory" in sentence
    (folder / "runs/any-2/events.jsonl").rename(folder / "gone")  # as `phalanx checkpoint reshard` makes directories
    assert "holds a run that saves checkpoints" in refused(unsaved, Request(directory=Path("runs/any-2")))
    (folder / "gone").rename(folder / "runs/any-2/events.jsonl")
    # A Kubernetes job that is still running is followed by the same command.
    first.rundir.job_file.write_text("{}")
    first.rundir.launch_id = "any-1"
    assert prepared(unsaved).rundir.path == first.rundir.path
    assert "a run with checkpoint.save = false resumes none" in refused(unsaved, Request(directory=Path("runs/any-2")))


def test_a_run_without_checkpoints_needs_no_disk_for_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, usage = loads(TEXT), shutil.disk_usage(folder)
    large = replace(run_plan := prepared(run).plan, parameters=8_000_000_000)
    assert run_plan.parameters < large.parameters
    monkeypatch.setattr("phalanx.launch.run_checks.shutil.disk_usage", lambda path: usage._replace(free=64_000_000_000))
    (sentence,) = space_problems(run, large, Path("runs/any"))
    assert "61,035 MiB free, but one checkpoint of 8,000.0 M parameters takes 91,569 MiB" in sentence
    assert "checkpoint.save = false" in sentence

    def problems(*overrides: str) -> list[str]:
        return list(space_problems(loads(TEXT, overrides=["checkpoint.save=false", *overrides]), large, Path("runs/any")))

    assert problems() == []
    (sentence,) = problems("memory.offload=nvme")  # whose files are in the run directory
    assert "the optimizer states and master weights of 8,000.0 M parameters take 91,569 MiB" in sentence
    monkeypatch.setattr("phalanx.launch.run_checks.shutil.disk_usage", lambda path: usage._replace(free=1_000_000))
    (sentence,) = problems()
    assert "1 MiB free, but logs and events take 16 MiB: free some space" in sentence
    assert storage_problems(loads(TEXT, overrides=["checkpoint.save=false", "checkpoint.url=nowhere://x"])) == []


PRESET = ["model.preset=gpt2-124m", "model.dim=16", "model.layers=1", "model.heads=2", "model.context=64"]


def test_rows_of_a_preset_without_its_tokenizer_are_asked_for(folder: Path) -> None:
    question = refused(loads(TEXT, overrides=PRESET))
    assert "50,257 rows" in question and not (folder / "runs").exists()
    on_bytes = prepared(loads(TEXT, overrides=[*PRESET, "data.tokenizer=byte"]))
    assert on_bytes.run.model.vocab == 320
    assert any("model.vocab = 320" in notice and "50,257" in notice for notice in on_bytes.notices)


def test_a_run_that_began_with_all_rows_of_a_preset_resumes_with_them(folder: Path) -> None:
    """Run files of earlier versions do not answer the question, and their directories hold the old model."""
    old = prepared(loads(TEXT, overrides=[*PRESET, "model.vocab=50257"]))
    take_a_step(old)
    again = prepared(loads(TEXT, overrides=PRESET))
    assert (again.rundir.path, again.resumes, again.run.model.vocab) == (old.rundir.path, True, 50257)


def test_binary_files_of_a_data_folder_are_skipped_by_name(folder: Path) -> None:
    before = prepared(loads(TEXT))
    assert before.opened is not None
    (folder / "text" / "picture.png").write_bytes(b"\x89PNG\r\n" + b"pixels" * 900)
    (folder / "text" / "model.safetensors").write_bytes(b"weights" * 900)
    (folder / "text" / "dump").write_bytes(b"abc\0" * 900)
    (folder / "text" / "NOTES").write_text("without a suffix " * 100)
    found = prepared(loads(TEXT, overrides=["train.seed=1"]))
    assert found.opened is not None and found.opened.documents == before.opened.documents + 1
    (notice,) = found.notices
    assert all(name in notice for name in ("picture.png", "model.safetensors", "dump", "data.paths")) and "NOTES" not in notice
    both = prepared(loads(TEXT, overrides=['data.paths=["text","text/dump"]', "train.seed=2"]))
    assert both.opened is not None and both.opened.documents == before.opened.documents + 2, "a file that is named is read"
    everything = prepared(loads(TEXT, overrides=['data.paths=["text/**"]', "train.seed=3"]))
    assert everything.opened is not None and everything.opened.documents == found.opened.documents


def test_a_folder_without_text_is_refused(folder: Path) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "one.png").write_bytes(b"pixels" * 900)
    sentence = refused(loads(TEXT, overrides=['data.paths=["pictures"]']))
    assert "holds no files of text" in sentence and "one.png" in sentence


def test_a_run_directory_inside_the_data_is_refused(folder: Path) -> None:
    sentence = refused(loads(TEXT), Request(directory=folder / "text" / "mine"))
    assert str(folder / "text" / "mine") in sentence and "data.paths" in sentence and "--run-dir" in sentence
    assert not (folder / "text" / "mine").exists()
    sentence = refused(loads(TEXT, overrides=['data.paths=["."]']))
    assert "runs/any is inside ." in sentence
    shutil.move(prepared(loads(TEXT)).rundir.path, folder / "text" / "old")
    sentence = refused(loads(TEXT))
    assert f"the run directory {folder / 'text' / 'old'} is inside {folder / 'text'}" in sentence
    assert prepared(loads(TEXT, overrides=['data.paths=["text/*.txt"]'])).notices == ()


def test_a_run_says_what_it_reads(folder: Path) -> None:
    (folder / "text" / "two.txt").write_text("another text " * 200)
    found = prepared(loads(TEXT, overrides=["data.eval_fraction=0"]))
    size = sum(file.stat().st_size for file in (folder / "text").iterdir())
    assert found.opened is not None
    assert (found.opened.documents, found.opened.tokens) == (2, size + 2), "an end token follows each document"
    assert found.opened.run_tokens == 4 * 8 * 32
    (line,) = (event_line(event) for event in first_events(found) if isinstance(event, DataOpened))
    epochs, each = 1024 / (size + 2), 1024 / found.plan.parameters
    assert line is not None
    for part in ("2 documents", f"{epochs:.3g} epochs", f"{each:.3g} tokens per parameter"):
        assert part in line.plain
