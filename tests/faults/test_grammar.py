"""The text of --chaos: read, written back, refused in words; and random faults that are the same everywhere."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.faults.grammar import (
    DEFAULT_KINDS,
    RANDOM_KINDS,
    Fault,
    check,
    draw_faults,
    expand_random,
    format_faults,
    is_node_fault,
    parse,
)
from phalanx.spec.errors import RunError

ISSUED = (
    "kill rank=3 step=10; hang rank=1 step=25 for=20s; slow rank=2 x3 from=30; corrupt rank=1 step=40; nan rank=0 step=45; "
    "kill node=1 step=50; fill-disk; drop-link 0-1 for=5s; random rate=0.02"
)


def test_every_fault_kind_is_parsed() -> None:
    assert parse(ISSUED) == (
        Fault(kind="kill", rank=3, step=10),
        Fault(kind="hang", rank=1, step=25, seconds=20.0),
        Fault(kind="slow", rank=2, factor=3.0, step=30),
        Fault(kind="corrupt", rank=1, step=40, what="weights"),
        Fault(kind="nan", rank=0, step=45),
        Fault(kind="kill", node=1, step=50),
        Fault(kind="fill-disk", step=1, seconds=10.0),
        Fault(kind="drop-link", link=(0, 1), seconds=5.0),
        Fault(kind="random", rate=0.02),
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hang rank=0 step=3 in=collective", Fault(kind="hang", rank=0, step=3, point="collective")),
        ("kill rank=0 step=3 during=save", Fault(kind="kill", rank=0, step=3, point="save")),
        ("kill node=1 step=50 for=1.5s", Fault(kind="kill", node=1, step=50, seconds=1.5)),
        ("slow from=30 to=60 x1.5 rank=2", Fault(kind="slow", rank=2, factor=1.5, step=30, to=60)),
        ("delay rank=2 in=data for=40ms from=3", Fault(kind="delay", rank=2, point="data", seconds=0.04, step=3)),
        ("corrupt rank=1 step=4 what=optimizer", Fault(kind="corrupt", rank=1, step=4, what="optimizer")),
        ("nan rank=0 step=4 layer=blocks.3.mlp", Fault(kind="nan", rank=0, step=4, layer="blocks.3.mlp")),
        ("raise rank=2 step=4 in=data", Fault(kind="raise", rank=2, step=4, point="data")),
        ("freeze node=0 step=4 for=2m", Fault(kind="freeze", node=0, step=4, seconds=120.0)),
        ("miscompute node=2", Fault(kind="miscompute", node=2)),
        ("fill-disk step=7 for=250ms", Fault(kind="fill-disk", step=7, seconds=0.25)),
        ("drop-link 2-1 step=9", Fault(kind="drop-link", link=(2, 1), step=9, seconds=10.0)),
        (
            "random rate=.5 seed=7 kinds=kill,kill-node",
            Fault(kind="random", rate=0.5, seed=7, kinds=("kill", "kill-node")),
        ),
    ],
)
def test_every_fault_word_is_parsed(text: str, fault: Fault) -> None:
    assert parse(f" ; {text} ;") == (fault,)
    assert parse(str(fault)) == (fault,)


def test_written_values_are_read_back() -> None:
    dice = random.Random(5)
    drawn = draw_faults(200, steps=900, ranks=8, nodes=4, kinds=RANDOM_KINDS)
    odd = [replace(fault, seconds=dice.random() * 10**-3) if fault.seconds else fault for fault in drawn]
    faults = (*drawn, *odd, *parse(ISSUED))
    assert parse(format_faults(faults)) == faults
    assert format_faults(parse(ISSUED)).replace(" for=10s", "") == ISSUED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil rank=3 step=1", ['"kil rank=3 step=1"', "no fault kil", "did you mean kill?", "drop-link"]),
        ("hang rank=1 stepp=25", ["hang does not take stepp=25", "did you mean step?", "in=", "for example: hang rank=1"]),
        ("hang rank=1", ["step= is missing", "for example: hang rank=1 step=25"]),
        ("kill step=3", ["rank= or node= is missing"]),
        ("kill rank=1 node=1 step=3", ["rank and node do not go together"]),
        ("kill rank=1 step=3 for=5s", ["for= is for nodes"]),
        ("kill node=1 step=3 during=save", ["during= is for ranks"]),
        ("kill rank=one step=3", ["rank=one is not a rank, counted from 0"]),
        ("kill rank=1 step=0", ["step=0 is not a step, counted from 1"]),
        ("kill rank=1 rank=2 step=1", ["rank is given twice"]),
        ("hang rank=1 step=2 for=20", ["for=20 is not a duration such as 20s, 1.5s or 2m"]),
        ("hang rank=1 step=2 for=0s", ["for=0s is not a duration"]),
        ("hang rank=1 step=2 in=colective", ["in=colective is not data, compute", "did you mean collective?"]),
        ("corrupt rank=1 step=2 what=gradient", ["did you mean gradients?"]),
        ("slow rank=1 x1", ["x1 is not a factor above 1 such as x3"]),
        ("slow rank=1 from=3", ["xFACTOR is missing", "slow rank=2 x3 from=30"]),
        ("slow rank=1 x2 from=9 to=3", ["to=3 is before from=9"]),
        ("fill-disk from=3 step=3", ["from and step do not go together"]),
        ("drop-link 1-1", ["1-1 is not two different nodes such as 0-1"]),
        ("drop-link for=3s", ["A-B is missing"]),
        ("random rate=2", ["rate=2 is not a probability above 0 and at most 1"]),
        ("random rate=0.1 kinds=kill,slo", ["did you mean slow?", "kill-node"]),
        ("nan rank=0 step=1 layer=a/b", ["layer=a/b is not the name of a module"]),
        ("kill rank=1 step=1 now", ["kill does not take now"]),
    ],
)
def test_bad_fault_text_is_refused_with_word_choices_and_example(text: str, words: list[str]) -> None:
    with pytest.raises(RunError) as error:
        parse(text)
    (problem,) = error.value.problems
    assert problem.startswith("--chaos") and problem.endswith(".")
    assert "for example" in problem or "The faults are" in problem
    for word in words:
        assert word in problem


def test_all_problems_of_a_fault_text_are_reported_together() -> None:
    with pytest.raises(RunError) as error:
        parse("kil rank=1; hang rank=1 step=2; slow rank=2")
    assert len(error.value.problems) == 2


def test_random_fault_text_raises_only_run_errors() -> None:
    dice, letters = random.Random(11), "kilhangstep=rankx0123-.;, \tfor=5s~é\x00\n"
    for _ in range(3000):
        text = "".join(dice.choice(letters) for _ in range(dice.randrange(40)))
        try:
            assert bool(parse(text)) == bool(text.replace(";", "").strip())
        except RunError as error:
            assert error.problems


def test_faults_outside_the_run_are_reported() -> None:
    problems = check(parse("kill rank=4 step=10; kill node=2 step=11; drop-link 0-2; hang rank=0 step=1"), 4, 2, 10)
    assert len(problems) == 4
    for words in ("no rank 4, the run has ranks 0 to 3", "no node 2", "cluster.nodes", "no step 11, the run has steps 1 to 10"):
        assert any(words in problem for problem in problems), words
    (alone,) = check(parse("random rate=0.1 kinds=kill,kill-node"), 2, 1, 10)
    assert "kill-node needs several nodes" in alone
    (alone,) = check(parse("miscompute node=0"), 2, 1, 10)
    assert "miscompute needs several nodes" in alone
    assert not check(parse(ISSUED), 4, 2, 50)


def test_node_faults_are_told_from_rank_faults() -> None:
    texts = {
        text: is_node_fault(parse(text)[0])
        for text in ("kill rank=0 step=1", "kill node=0 step=1", "fill-disk", "drop-link 0-1")
    }
    assert list(texts.values()) == [False, True, True, True]
    assert is_node_fault(parse("freeze rank=0 step=1 for=1s")[0])  # it cannot wake itself


def test_random_faults_follow_from_the_seed_alone() -> None:
    faults = parse("kill rank=0 step=3; random rate=0.1 seed=7; random rate=0.1 seed=8 kinds=nan")
    drawn = expand_random(faults, steps=1000, ranks=4, nodes=2)
    assert drawn == expand_random(faults, steps=1000, ranks=4, nodes=2)
    assert drawn[0] == faults[0] and not check(drawn, 4, 2, 1000)
    assert 140 < len(drawn) < 260
    assert {fault.kind for fault in drawn} == {"kill", "hang", "slow", "corrupt", "nan", "raise", "fill-disk", "drop-link"}
    assert all(fault.seconds for fault in drawn if is_node_fault(fault))  # nothing is gone for good
    assert expand_random(parse("random rate=0.1 seed=9"), steps=1000, ranks=4, nodes=2) != drawn


def test_random_faults_of_one_node_never_need_several_nodes() -> None:
    drawn = expand_random(parse("random rate=1"), steps=300, ranks=1, nodes=1)
    assert len(drawn) == 300 and not any(fault.node is not None or fault.link for fault in drawn)
    assert not expand_random(parse("random rate=1 kinds=drop-link"), steps=300, ranks=2, nodes=1)


@pytest.mark.parametrize(("count", "steps"), [(100, 500), (9, 10), (1, 2), (40, 60)])
def test_campaign_draws_equally_many_faults_of_each_kind(count: int, steps: int) -> None:
    faults = draw_faults(count, steps=steps, ranks=4, nodes=2, seed=3)
    assert len(faults) == count and not check(faults, 4, 2, steps)
    assert len({fault.step for fault in faults}) == count and min(fault.step for fault in faults) > 1
    kinds = Counter("kill-node" if fault.kind == "kill" and fault.node is not None else fault.kind for fault in faults)
    assert max(kinds.values()) - min(kinds.values()) <= 1 and len(kinds) == min(count, len(DEFAULT_KINDS))
    assert all(fault.step <= 0.6 * steps + 2 for fault in faults if fault.kind == "fill-disk")


def test_the_page_shows_every_kind_and_its_examples_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text().partition("## Campaigns")[0]
    table = page.partition("| `data` |")[0]  # the points of a step have a table of their own
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    faults = [fault for row in rows for fault in parse(row)]
    assert {fault.kind for fault in faults} == {fault.kind for fault in parse(ISSUED)} | {
        "raise",
        "freeze",
        "miscompute",
        "delay",
    }
    assert set(
        re.search(r"`kinds=` takes names separated by commas: ([^.;]+)", page, re.S)[1]
        .replace("`", "")
        .replace("\n", " ")
        .split(", ")
    ) == set(RANDOM_KINDS)  # type: ignore[index]


def test_random_faults_never_take_two_nodes() -> None:
    for drawn in (
        draw_faults(90, steps=400, ranks=8, nodes=4, seed=1),
        expand_random(parse("random rate=0.5 seed=3"), steps=400, ranks=8, nodes=4),
    ):
        assert len({fault.node for fault in drawn if fault.node is not None}) == 1
    nodes = {fault.node for seed in range(20) for fault in draw_faults(9, steps=40, ranks=8, nodes=4, seed=seed)} - {None}
    assert nodes == {0, 1, 2, 3}
