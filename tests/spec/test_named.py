"""Tables that the person names, [data.mix.NAME], and the free one, [model.options]: what they hold and how mistakes are told."""

from dataclasses import replace

import pytest

from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import MixedSource

GOOD = "[train]\nbatch = 8\nsteps = 10\n"  # later lines of a case start at 4

# (text, overrides, for the one expected problem: what it must contain)
MISTAKES = {
    # Tables that the person names.
    "misspelled key of a source": (
        GOOD + "[data.mix.wiki]\nwieght = 1\n",
        [],
        [("run.toml:5: ", "data.mix.wiki.wieght is not a key", "did you mean data.mix.wiki.weight?")],
    ),
    "misspelled key of a source on the command line": (
        GOOD,
        ["data.mix.wiki.wieght=1"],
        [("command line: data.mix.wiki.wieght=1: ", "did you mean data.mix.wiki.weight?")],
    ),
    "another trainer's name in a source": (
        GOOD + "[data.mix.wiki]\ntext_field = 'body'\n",
        [],
        [("run.toml:5: ", "did you mean data.mix.wiki.field?")],
    ),
    "wrong value in a source": (
        GOOD + "[data.mix.wiki]\npaths = 'a.txt'\nweight = -1\n",
        [],
        [("run.toml:6: ", "data.mix.wiki.weight = -1.0 is out of range: it must be greater than 0.0.")],
    ),
    "plain value for a source": (
        GOOD + "[data.mix]\nwiki = 3\n",
        [],
        [("run.toml:5: ", "data.mix.wiki = 3 is an integer, but data.mix.wiki is a table", "such as data.mix.wiki.source")],
    ),
    "source without a name": (
        GOOD + "[data.mix]\nsource = 'text'\n",
        [],
        [("run.toml:5: ", 'data.mix.source = "text" is a string', "write [data.mix.NAME] above it")],
    ),
    "list for a mixture": (
        GOOD + "[data]\nmix = []\n",
        [],
        [("run.toml:5: ", "data.mix = [] is a list", "write [data.mix.NAME] and its keys below")],
    ),
    "list of tables for a mixture": (
        GOOD + "[[data.mix]]\nsource = 'text'\n",
        [],
        [("run.toml:4: ", "is a list", "write [data.mix.NAME] and its keys below")],
    ),
    "number for a mixture": (GOOD, ["data.mix=3"], [("command line: data.mix=3: ", "data.mix = 3 is an integer")]),
    "name that needs quotes": (
        GOOD + "[data.mix.'a b']\nsource = 'text'\n",
        [],
        [("run.toml:4: ", '"a b" is no name for an entry of data.mix', "letters, digits, _ and - only")],
    ),
    "name with a dot": (GOOD + "[data.mix.'a.b']\nsource = 'text'\n", [], [("run.toml:4: ", '"a.b" is no name')]),
    "table in a source": (GOOD + "[data.mix.wiki.x]\n", [], [("run.toml:4: ", "[data.mix.wiki.x] is not a table")]),
    "name inside the table": (
        GOOD + "[data.mix.wiki]\npaths = 'a.txt'\nname = 'wiki'\n",
        [],
        [("run.toml:6: ", "data.mix.wiki.name", "the header of its table names it")],
    ),
    "key of a source in no table of the mixture": (
        GOOD + "[data]\nweight = 3\n",
        [],
        [("run.toml:5: ", "data.weight is not a key", "did you mean data.mix.NAME.weight?")],
    ),
    "misspelled mixture": (GOOD + "[data.mixx.wiki]\n", [], [("run.toml:4: ", "did you mean [data.mix.NAME]?")]),
    # Free tables.
    "list among options": (
        GOOD + "[model]\nmodule = 'a.b:C'\n[model.options]\nx = 1\ny = [1]\n",
        [],
        [("run.toml:8: ", "model.options.y = [1] is a list, but a plain value", "a string, a number, true or false")],
    ),
    "table among options": (
        GOOD + "[model]\nmodule = 'a.b:C'\n[model.options.x]\ny = 1\n",
        [],
        [("run.toml:6: ", "model.options.x = { y = 1 } is a table, but a plain value")],
    ),
    "date among options": (GOOD, ["model.module=a:B", "model.options.x=2020-01-01"], [("is a date or time",)]),
    "option that is not a number": (GOOD, ["model.module=a:B", "model.options.x=nan"], [("model.options.x = nan",)]),
    "option that needs quotes": (
        GOOD + "[model]\nmodule = 'a:B'\n[model.options]\n'a b' = 1\n",
        [],
        [("run.toml:7: ", '"a b" is no name for an entry of model.options')],
    ),
    "number for options": (GOOD, ["model.options=3"], [("model.options = 3 is an integer, but model.options is a table",)]),
}


@pytest.mark.parametrize(("text", "overrides", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistake(text: str, overrides: list[str], expected: list[tuple[str, ...]]) -> None:
    with pytest.raises(RunError) as caught:
        loads(text, name="run.toml", overrides=overrides)
    (problem,), (parts,) = caught.value.problems, expected
    assert problem.startswith(("run.toml:", "command line: "))
    assert "\n" not in problem and problem[-1] in ".?"
    for part in parts:
        assert part in problem


def test_a_mixture() -> None:
    text = (
        GOOD + "[data.mix.wiki]\npaths = 'a.jsonl'\nfield = 'body'\nweight = 2\n[data.mix.a-1]\nsource = 'stdlib'\nweight = 1\n"
    )
    wiki = MixedSource(name="wiki", paths=("a.jsonl",), field="body", weight=2.0)
    code = MixedSource(name="a-1", source="stdlib", weight=1.0)
    assert loads(text).data.mix == (wiki, code)  # in the order of the file
    inline = (
        "[data]\nmix = { wiki = { paths = 'a.jsonl', field = 'body', weight = 2 }, a-1 = { source = 'stdlib', weight = 1 } }\n"
    )
    assert loads(GOOD + inline) == loads(text)
    assert loads(text, overrides=["data.mix.wiki.weight=0.3"]).data.mix == (replace(wiki, weight=0.3), code)
    added = loads(text, overrides=["data.mix.new.weight=1", "data.mix.new.paths=007"]).data.mix
    assert added == (wiki, code, MixedSource(name="new", paths=("007",), weight=1.0))
    assert loads(GOOD, overrides=["data.mix.one.source=stdlib"]).data.mix == (MixedSource(name="one", source="stdlib"),)


def test_options_of_a_module_are_plain_values() -> None:
    text = GOOD + "[model]\nmodule = 'a.b:C'\n[model.options]\nz = 1\nb = true\na-2 = 'x'\nf = 1.5\n"
    assert loads(text).model.options == (("a-2", "x"), ("b", True), ("f", 1.5), ("z", 1))
    model = loads(text, overrides=["model.options.z=3", "model.options.new=some text", "model.options.last='4'"]).model
    assert dict(model.options) == {"a-2": "x", "b": True, "f": 1.5, "z": 3, "new": "some text", "last": "4"}
