"""Names of earlier versions: refused with the new name where a person writes them, translated where a run wrote them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from phalanx.spec.dump import HEADER, dump
from phalanx.spec.errors import RunError
from phalanx.spec.fields import RENAMED_KEYS, current_tensor, original_tensor
from phalanx.spec.keys import KEYS
from phalanx.spec.layout import Layout
from phalanx.spec.load import load, loads
from phalanx.spec.origin import origin
from phalanx.spec.plan import Plan

RUN = 'model = "tiny-dense"\n[train]\nbatch = 8\nsteps = 10\nsequence_length = 64\n'
OLD_VALUES = {
    "model.ahead": 1,
    "model.ahead_weight": 0.5,
    "optimizer.local_steps": 3,
    "layout.cut": '"measured"',
    "checkpoint.asynchronous": "false",
    "resilience.go_on": "true",
    "resilience.notice": 20.0,
    "resilience.rewind_after": 4,
}


def with_old_names(text: str) -> str:
    """A resolved run file as an earlier version wrote it."""
    table, lines = "", []
    names = {new: old for old, new in RENAMED_KEYS.items()}
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            table = line.strip("[]\n")
        key, equals, value = line.partition(" = ")
        lines.append(
            names.get(f"{table}.{key}", line).rpartition(".")[2] + equals + value if f"{table}.{key}" in names else line
        )
    return "".join(lines)


def test_every_old_key_has_a_new_one_that_exists() -> None:
    assert not set(RENAMED_KEYS) & set(KEYS)
    assert set(RENAMED_KEYS.values()) <= set(KEYS)
    assert set(OLD_VALUES) == set(RENAMED_KEYS)


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_old_key_is_refused_with_its_new_name(old: str) -> None:
    new = RENAMED_KEYS[old]
    table, _, name = old.rpartition(".")
    text = RUN.replace('model = "tiny-dense"\n', "") + f"[{table}]\n{name} = {OLD_VALUES[old]}\n"
    with pytest.raises(RunError) as error:
        loads(text)
    assert (
        f"run file:{text.count(chr(10))}: {old} is now called {new}: write {new} = {OLD_VALUES[old]}." in error.value.problems
    )
    with pytest.raises(RunError) as error:
        loads(RUN, overrides=[f"{old}={OLD_VALUES[old]}".replace('"', "")])
    (problem,) = error.value.problems
    assert problem.startswith(f"command line: {old}=") and f"{old} is now called {new}: write {new} = " in problem


def test_run_file_of_an_earlier_run_is_translated(tmp_path: Path) -> None:
    run = loads(RUN, overrides=["model.mtp_depth=1", "resilience.preemption_notice=30", "checkpoint.async_save=false"])
    old = with_old_names(dump(run))
    assert old.startswith(HEADER) and "ahead = 1" in old and "notice = 30.0" in old and "mtp_depth" not in old
    assert loads(old) == run
    (tmp_path / "run.toml").write_text(old)
    assert load(tmp_path / "run.toml", ["train.steps=20"]) == replace(run, train=replace(run.train, steps=20))
    with pytest.raises(RunError, match=r"resilience.notice is now called resilience.preemption_notice"):
        load(tmp_path / "run.toml", ["resilience.notice=5"])
    start = origin(str(tmp_path))
    assert start is not None and start.model.mtp_depth == 1


def test_plan_of_an_earlier_run_is_translated() -> None:
    plan = Plan(
        layout=Layout(data=2, pipeline=2, stage_split="measured"), device="cpu", threads=1, micro_batch=1, accumulation=2,
        compute="fp32", parameters=10, flops_per_token=60.0, peak_flops=None,
    )  # fmt: skip
    old = plan.to_json().replace('"stage_split"', '"cut"')
    assert '"cut": "measured"' in old and Plan.from_json(old) == plan
    table = asdict(plan.layout)
    table["cut"] = table.pop("stage_split")
    assert Layout.from_saved(table) == plan.layout


def test_tensor_names_are_translated_both_ways() -> None:
    pairs = {
        "places.weight": "position_embed.weight",
        "model/places.weight": "model/position_embed.weight",
        "optimizer/ahead.0.block.mlp.up.weight/exp_avg": "optimizer/mtp.0.block.mlp.up.weight/exp_avg",
    }
    for old, new in pairs.items():
        assert (current_tensor(old), original_tensor(new)) == (new, old)
        assert (current_tensor(new), original_tensor(old)) == (new, old)
    for same in ("model/blocks.0.ahead.weight", "head.weight", "model/aheads.weight", "step"):
        assert current_tensor(same) == original_tensor(same) == same
