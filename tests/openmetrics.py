"""A strict reader of OpenMetrics text: what the specification demands and what Phalanx uses of it, independent of the code that writes it."""

from __future__ import annotations

import re

Labels = tuple[tuple[str, str], ...]
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(,|$)')
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_SUFFIX = {"counter": "_total", "info": "_info", "gauge": "", "stateset": ""}
_ESCAPE = re.compile(r"\\(.)")


def samples(text: str) -> dict[tuple[str, Labels], float]:
    """Every sample by its full name and labels. Fails on whatever a strict parser refuses."""
    assert text.endswith("# EOF\n") and text.split("\n").count("# EOF") == 1, "the text ends with # EOF and a line feed"
    found: dict[tuple[str, Labels], float] = {}
    seen: set[str] = set()
    family = kind = ""
    described: set[str] = set()
    for line in text.split("\n")[:-2]:
        if line.startswith("# "):
            word, name, rest = line[2:].split(" ", 2)
            assert word in ("TYPE", "UNIT", "HELP"), line
            if name != family:
                assert name not in seen, f"{name} is in two places"
                seen.add(name)
                family, kind, described = name, "", set()
            assert word not in described and not any(key[0].startswith(f"{name}{{") for key in found), line
            described.add(word)
            if word == "TYPE":
                assert rest in _SUFFIX, line
                kind = rest
            if word == "UNIT":
                assert name.endswith(f"_{rest}") and kind in ("gauge", "counter"), line
        else:
            name, labels, value = _sample(line)
            assert kind and name == family + _SUFFIX[kind], f"{line!r} is no sample of the {kind or 'unknown'} {family}"
            assert (name, labels) not in found, f"{line!r} is there twice"
            found[name, labels] = value
            if kind in ("counter", "info"):
                assert value >= 0, line
            if kind == "stateset":
                assert value in (0.0, 1.0) and family in dict(labels), line
    return found


def _sample(line: str) -> tuple[str, Labels, float]:
    match = _SAMPLE.fullmatch(line)
    assert match is not None, f"{line!r} is no sample"
    name, inside, value = match.groups()
    labels: list[tuple[str, str]] = []
    at = 0
    while inside and at < len(inside):
        label = _LABEL.match(inside, at)
        assert label is not None, f"the labels of {line!r}"
        labels.append((label[1], _ESCAPE.sub(lambda escape: {"n": "\n"}.get(escape[1], escape[1]), label[2])))
        at = label.end()
    assert len(dict(labels)) == len(labels), f"a label of {line!r} is there twice"
    assert value in ("NaN", "+Inf", "-Inf") or re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", value), line
    return name, tuple(labels), float(value)
