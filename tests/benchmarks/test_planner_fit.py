"""Published steps: how rows are read, and that the shipped constants predict them as well as the documentation says."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from phalanx.planning.cost.job_table import RECOMPUTE, SCHEDULES
from phalanx.planning.machines.rates import NAMES, constants
from phalanx.spec.errors import RunError
from planner.constants import FAMILIES, rates_here, shipped
from planner.fit import Solved, fitted, predict
from planner.step_model import model
from planner.steps import Table, publication, read, table
from planner.validation import covered, doubts, factors, known_by, left_out, summary, sweeps

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "published" / "steps.csv"


@pytest.fixture(scope="module")
def published() -> Table:
    return read(FILE, core=False)


@pytest.fixture(scope="module")
def blank() -> dict[str, str]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return dict.fromkeys(next(csv.reader(file)), "")


@pytest.fixture
def row(blank: dict[str, str]) -> dict[str, str]:
    """Llama-3 8B on eight H100, as complete as rows come."""
    said = {"id": "a", "source": "somebody", "year": "2024", "model_name": "Llama", "params_B": "8.03", "layers": "32"}
    said |= {"hidden": "4096", "ffn_hidden": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "seq_len": "8192"}
    said |= {"gpu": "H100-SXM-80GB", "n_gpus": "8", "tp": "1", "pp": "1", "cp": "1", "zero_or_fsdp": "FSDP2 (ZeRO-3)"}
    said |= {"recompute": "none", "precision": "bf16", "micro_batch": "1", "global_batch_seqs": "16", "iter_time_s": "3.5"}
    return blank | said | {"core": "1"}


def test_the_shipped_constants_reproduce_the_documented_errors(published: Table) -> None:
    """docs/planner-accuracy.md prints what the constants reach on the rows that they were fitted to; a change of either shows here."""
    predicted = predict(shipped(constants()), published)
    text = (ROOT / "docs" / "planner-accuracy.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"in sample, (dense|MoE): (\S+) % / \S+ %", text))
    far = dict(re.findall(r"in sample, (dense|MoE): \S+ % / (\S+) %", text))
    for name, moe in (("dense", False), ("MoE", True)):
        rows = published.core & (published.moe == moe)
        own = summary(published.seconds[rows], predicted[rows])
        assert own.median * 100 == pytest.approx(float(said[name]), abs=0.1)
        assert own.ninetieth * 100 == pytest.approx(float(far[name]), abs=0.1)


@pytest.mark.parametrize("by", ["publications", pytest.param("sources", marks=pytest.mark.slow)])
def test_what_is_left_out_is_predicted_within_the_targets(published: Table, by: str) -> None:
    solved, groups = Solved.of(published, shipped(constants())), getattr(published, by)
    predicted = left_out(solved, groups, published.core)
    inside = covered(published, predicted, groups, doubts(solved.fit, published))
    for moe, median, ninetieth in ((False, 0.08, 0.20), (True, 0.13, 0.35)):
        rows = published.core & (published.moe == moe)
        own = summary(published.seconds[rows], predicted[rows])
        assert own.median <= median and own.ninetieth <= ninetieth
        assert 0.75 <= inside[rows].mean() <= 0.85
    wide = published.take(~np.isnan(predicted))
    found = sweeps(wide, predicted[~np.isnan(predicted)])
    assert len(found) >= 5
    assert np.mean([sweep.first for sweep in found]) <= 0.03 and max(sweep.first for sweep in found) <= 0.08
    assert np.mean([sweep.third for sweep in found]) <= 0.015


def test_leaving_out_by_kept_slopes_is_leaving_out(published: Table) -> None:
    """The quick way against a fit from the priors, on one family's rows."""
    some = published.take((published.family == "v100") | (published.stack == "nanotron"))
    quick = Solved.of(some).without(some.stack == "nanotron")
    slow = fitted(some.take(some.stack != "nanotron"), rounds=30)
    there = some.take(some.stack != "nanotron")
    assert predict(quick, there) == pytest.approx(predict(slow, there), rel=0.02)


def test_intervals_are_wider_where_less_is_known(published: Table) -> None:
    wide = doubts(shipped(constants()), published)
    assert np.all(wide >= 1) and wide.max() > 1.5
    few, many = known_by(np.array(["v100", "a100"]), published)
    assert few > many > 1 and known_by(np.array(["abacus"]), published)[0] > few
    # Of a hundred misses: the outer tenths, and further out the fewer publications they come from.
    misses = np.linspace(-1, 1, 101)
    one, several = (factors(misses, np.arange(101) % count) for count in (1, 50))
    assert several == pytest.approx((-0.8, 0.8), abs=0.01)
    assert one[0] < several[0] and one[1] > several[1]


def test_few_rows_are_excluded_and_each_has_a_reason(published: Table) -> None:
    core = [reason for name, reason in published.excluded if name in set(published.excluded_core)]
    assert len(core) < 0.07 * (published.core.sum() + len(core))
    assert all(core)


def test_a_row_is_read_as_it_says(row: dict[str, str]) -> None:
    work = table([row]).work
    assert (work.zero[0], work.shard[0], work.data[0], work.accumulation[0]) == (3, 8, 1, 2)
    assert (work.gated[0], work.tied[0], work.island[0], work.network[0]) == (1, 0, 8, 50e9)
    hybrid = table([row | {"n_gpus": "64", "global_batch_seqs": "128", "zero_or_fsdp": "HSDP shard 8"}]).work
    assert (hybrid.shard[0], hybrid.data[0]) == (8, 8)
    piped = row | {"pp": "4", "vpp": "4", "schedule": "interleaved 1F1B", "zero_or_fsdp": "distributed optimizer"}
    assert SCHEDULES[int(table([piped]).work.schedule[0])] == "interleaved-1f1b"


def test_software_that_rows_name_has_its_habits(row: dict[str, str]) -> None:
    fsdp = table([row | {"source": "torchtitan", "recompute": "selective", "precision": "float8"}])
    assert (RECOMPUTE[int(fsdp.work.recompute[0])], fsdp.repeated[0], fsdp.work.gathered[0]) == ("full", 0.5, 1)
    pure = table([row | {"precision": "bf16/PURE"}]).work
    assert (pure.wire[0], pure.moments[0]) == (2, 4)
    # What is not said: 16k tokens, but not so many that most blocks would have to be computed twice.
    silent = row | {"micro_batch": "", "global_batch_seqs": "64", "recompute": ""}
    assert table([silent]).work.micro_batch[0] == 2
    assert table([silent | {"gpu": "H100-SXM-20GB"}]).work.micro_batch[0] == 1


def test_times_come_from_seconds_then_tokens_then_flops(row: dict[str, str]) -> None:
    assert table([row]).seconds[0] == 3.5
    tokens = table([row | {"iter_time_s": "", "tokens_per_s_per_gpu": "8192"}])
    assert tokens.seconds[0] == pytest.approx(2.0)
    flops = row | {"iter_time_s": "", "tflops_per_gpu": "400", "conv_class": "model-causal-attn"}
    expected = 2 * 8192 * (6 * (8.03e9 - 128256 * 4096) + 6 * 32 * 4096 * 8192) / 400e12
    assert table([flops]).seconds[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"gpu": "abacus"}, "device"),
        ({"iter_time_s": ""}, "no time"),
        ({"n_gpus": ""}, "number of devices"),
        ({"id": "a-oom"}, "memory"),
        ({"zero_or_fsdp": "ZeRO-3 + CPU offload"}, "offload"),
        ({"notes": "deterministic mode"}, "deterministic"),
        ({"layers": "", "hidden": "", "experts": "8"}, "sizes"),
    ],
)
def test_a_row_that_tells_too_little_is_excluded(row: dict[str, str], said: dict[str, str], reason: str) -> None:
    found = table([row, row | said])
    assert len(found.ids) == 1
    assert len(found.excluded) == 1 and reason in found.excluded[0][1]


def test_what_cannot_be_read_is_said(row: dict[str, str], tmp_path: Path) -> None:
    assert "number" in table([row, row | {"layers": "about 30"}]).excluded[0][1]
    with pytest.raises(RunError, match="None of 1 rows"):
        table([row | {"gpu": "abacus"}])
    short = tmp_path / "short.csv"
    short.write_text("id,source\na,b\n")
    with pytest.raises(RunError, match="lacks the columns"):
        read(short)


def test_an_experts_width_follows_from_the_parameters(blank: dict[str, str]) -> None:
    said = {"model_name": "DeepSeek-V3", "params_B": "671", "layers": "61", "hidden": "7168", "ffn_hidden": "18432"}
    sizes = model(blank | said | {"heads": "128", "experts": "256", "top_k": "8", "vocab": "129280"}, [])
    assert sizes is not None
    assert (sizes["expert_ffn"], sizes["shared_ffn"], sizes["sparse_layers"]) == (2048, 2048, 58)


def test_editions_and_tables_of_a_document_are_one_publication() -> None:
    assert publication("A report (arXiv 1234.5) T4") == publication("A report (arXiv 1234.5) T6")
    assert publication("Summary of speed, container 26.02") == publication("Summary of speed, container 25.09")
    assert publication("One thing") != publication("Another thing")


def test_shipped_constants_follow_from_the_fit_in_the_same_file() -> None:
    """The tables that plans read follow from the fit's own numbers; an edit by hand would show."""
    table = constants()
    fit = shipped(table)
    assert set(table["family"]) == set(FAMILIES)
    for family in FAMILIES:
        for precision, values in table["family"][family].items():
            computed = rates_here(fit, family, precision)
            assert set(values) <= set(NAMES)
            for name, value in values.items():
                assert value == pytest.approx(computed[name], rel=1e-4)
    assert table["common"]["knee"] == pytest.approx(rates_here(fit, None, "bf16")["knee"], rel=1e-4)
