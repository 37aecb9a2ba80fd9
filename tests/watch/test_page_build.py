"""The built page that is shipped is that of the sources, and looks like the page of a plan."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from phalanx.watch.page_server import static_files

ROOT = Path(__file__).parents[2]
FRONTEND = ROOT / "frontend"
STATIC = files("phalanx.watch").joinpath("static")


def test_the_committed_build_is_of_these_sources() -> None:
    """`make page` builds it anew, which needs npm."""
    if not FRONTEND.is_dir():
        pytest.skip("an installed package has no sources of the page")
    names = [path.relative_to(FRONTEND).as_posix() for path in (FRONTEND / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted([*names, "build.mjs", "package.json", "package-lock.json"]):
        digest.update(name.encode() + b"\0" + (FRONTEND / name).read_bytes() + b"\0")
    built = json.loads(STATIC.joinpath("build.json").read_text())
    assert built["sources"] == digest.hexdigest(), "frontend/ has changed since the page was built: run `make page`"


def test_the_page_has_no_inline_script_and_loads_nothing_from_elsewhere() -> None:
    served = static_files()
    page = served["/"].body.decode()
    assert re.findall(r"<script(?![^>]*src=)", page) == [] and "style=" not in page and "onload" not in page
    for path in ("/page.js", "/page.css"):
        addresses = set(re.findall(r"https?://[\w./-]+", served[path].body.decode()))
        assert addresses <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xhtml",
            "http://www.w3.org/1998/Math/MathML",
            "http://www.w3.org/1999/xlink",
        }


def test_the_licenses_of_bundled_libraries_are_shipped() -> None:
    text = static_files()["/licenses.txt"].body.decode()
    assert all(name in text for name in ("preact", "uplot")) and text.count("Permission is hereby granted") == 2


def test_no_text_becomes_markup() -> None:
    sources = "".join(path.read_text() for path in (FRONTEND / "src").rglob("*.ts*")) if FRONTEND.is_dir() else ""
    assert not re.search(r"dangerouslySetInnerHTML|innerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", sources)


def colors(css: str) -> list[dict[str, str]]:
    """The custom properties of each rule of :root."""
    rules = [dict(re.findall(r"--(\w+): (#\w+)", rule)) for rule in re.findall(r":root[^{]*\{([^}]*)\}", css)]
    long = lambda value: value if len(value) == 7 else "#" + "".join(2 * letter for letter in value[1:])  # noqa: E731
    return [{name: long(value) for name, value in rule.items()} for rule in rules if rule]


def test_colors_are_those_of_the_plan() -> None:
    light, dark = colors(files("phalanx.dashboard").joinpath("plan.css").read_text())
    own = colors(
        (ROOT / "frontend" / "src" / "page.css").read_text() if FRONTEND.is_dir() else STATIC.joinpath("page.css").read_text()
    )
    for theirs, ours in ((light, own[0]), (dark, own[1]), (dark, own[2])):
        assert {name: ours[name] for name in theirs} == theirs
