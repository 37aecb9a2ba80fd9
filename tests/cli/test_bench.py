"""`phalanx bench step` with real processes on CPU, and what the command refuses."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import Ended, InProcess, Workshop

ON_TORCH = "phalanx,transformers,torchtitan,torchtitan-fsdp,hand"
STEPS = ("--steps", 4, "--rounds", 2, "--warmup", 2, "--micro-batch", 2)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ended, Path]]:
    """One comparison of the trainers that compute with torch, for several tests."""
    shop = Workshop(tmp_path_factory.mktemp("bench") / "workshop")
    ended = shop.run(
        "bench",
        "step",
        "tiny.toml",
        "data.document_mask=false",
        *STEPS,
        "--peers",
        ON_TORCH,
        "--picture",
        "steps.svg",
        "--json",
    )
    yield ended, shop.path
    shop.close()


def test_a_comparison_of_real_processes(compared: tuple[Ended, Path]) -> None:
    ended, _ = compared
    assert ended.code == 0, ended
    found = ended.json
    assert (found["micro_batch"], found["sequence_length"], found["documents_masked"]) == (2, 32, False)
    trainers = found["trainers"]
    for name in ("phalanx", "hand"):
        ran = trainers[name]
        assert ran["ran"] and len(ran["step_seconds"]["all"]) == 4, ran
        assert ran["tokens_per_second"] == pytest.approx(2 * 32 / ran["step_seconds"]["median"])
        assert 50 << 20 < ran["peak_bytes"] < 4 << 30 and len(ran["losses"]) == 3
    assert trainers["hand"]["same_loss"] is True
    assert trainers["hand"]["losses"] == pytest.approx(trainers["phalanx"]["losses"], rel=1e-5)
    assert trainers["phalanx"]["losses"][-1] < trainers["phalanx"]["losses"][0]


def test_transformers_is_compared_where_it_is_installed(compared: tuple[Ended, Path]) -> None:
    found = compared[0].json["trainers"]["transformers"]
    if find_spec("transformers") is None:
        assert found["reason"] == 'not installed: pip install "phalanx[hf]"'
    else:
        assert found["same_loss"] is True and found["token_loss_difference"] < 1e-5, found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax") is None or find_spec("torchax") is None, reason="the XLA engine needs the extra `xla`")
def test_both_engines_are_compared(tmp_path: Path) -> None:
    shop = Workshop(tmp_path / "workshop")
    try:
        ended = shop.run(
            "bench", "step", "tiny.toml", "data.document_mask=false", *STEPS, "--peers", "phalanx,phalanx-xla,jax", "--json"
        )
    finally:
        shop.close()
    assert ended.code == 0, ended
    found = ended.json
    for name in ("phalanx-xla", "jax"):
        ran = found["trainers"][name]
        assert ran["ran"] and ran["same_loss"] is True and ran["step_loss_difference"] < 1e-5, ran
        assert ran["first_step_seconds"] > ran["step_seconds"]["median"], "the first step compiles"
    assert found["best_peer"] == "jax", "the other engine is no peer"
    medians = {name: ran["step_seconds"]["median"] for name, ran in found["trainers"].items()}
    assert found["xla_ratio"] == pytest.approx(medians["phalanx"] / medians["phalanx-xla"])
    assert "phalanx-xla: " in ended.shown and "× the speed of the torch engine" in ended.shown


def test_people_get_a_table_and_a_picture(compared: tuple[Ended, Path]) -> None:
    ended, folder = compared
    assert "the speed of the best peer" in ended.shown and "same loss" in ended.shown and "wrote steps.svg" in ended.shown
    picture = (folder / "steps.svg").read_text()
    assert picture.lstrip().startswith("<?xml") and "</svg>" in picture


def test_phalanx_trains_as_the_command_does(compared: tuple[Ended, Path], tmp_path: Path) -> None:
    """The losses of the comparison are those of `phalanx train` with the same batch: it runs the same program."""
    shop = Workshop(tmp_path / "workshop")
    try:
        # Rates follow from the number of steps: two of warm-up, four measured, one more.
        ended = shop.train("data.document_mask=false", "train.batch=2", "train.steps=7", "train.eval_every=100")
        assert ended.code == 0
        trained = [event.loss for event in shop.events() if event.__class__.__name__ == "Step"]
    finally:
        shop.close()
    assert compared[0].json["trainers"]["phalanx"]["losses"] == trained[:3]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "Name a run file, or a model"),
        (("--model", "llama9"), 'model.preset = "llama9" is not a known model'),
        (("nowhere.toml",), "nowhere.toml"),
        (("a.toml", "--model", "tiny-dense"), "a.toml and --model tiny-dense: give a run file or a preset"),
        (("--model", "tiny-dense", "model.dims=3"), "model.dims"),
        (("--model", "tiny-dense", "--peers", "megatron"), "--peers megatron is not known"),
        (("--model", "tiny-dense", "--picture", "steps.pdf"), "--picture steps.pdf: its name must end in .svg or .png"),
        (("--model", "tiny-dense", "--picture", "none/steps.svg"), "there is no folder none"),
        (("--model", "tiny-dense", "--device", "tpu"), "cluster.device"),
        (("--model", "tiny-dense", "--rounds", 30), "--rounds 30 is more than --steps 20"),
        (("--model", "tiny-dense", "optimizer.name=muon"), "all trainers are compared with AdamW"),
        (("--model", "gpt2-124m", "--sequence", 2048), "2048"),
    ],
)
def test_bad_input_is_refused(here: InProcess, words: tuple[object, ...], sentence: str) -> None:
    ended = here("bench", "step", *words)
    assert ended.code == 2 and sentence in ended.err and ended.err.startswith("error: "), ended


def test_the_machine_is_still_measured_without_a_word(here: InProcess) -> None:
    ended = here("bench", "--minutes", 0.1)
    assert ended.code == 2 and "--minutes" in ended.err, "the option of `phalanx bench` itself"
    shown = here("bench", "step", "--help").shown
    assert "12·layers·width·sequence" in shown and "causal MFU" in shown
