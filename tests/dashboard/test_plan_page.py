"""A plan's page: one file that needs nothing, its numbers in it, and a program that shows, sorts and chooses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import plans
import pytest

from phalanx.dashboard.plan_page import page, page_data
from phalanx.planning.report import PlanReport, report_of
from phalanx.planning.search.candidate import Alternative

DOM = """
class Node {
  constructor(name) { this.name = name; this.children = []; this.attributes = {}; this.listeners = {}; this.style = {}; this.own = ""; }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  appendChild(child) { this.children.push(child); return child; }
  append(text) { this.own += text; }
  replaceChildren() { this.children = []; this.own = ""; }
  addEventListener(kind, react) { this.listeners[kind] = react; }
  click() { this.listeners.click({ stopPropagation() {} }); }
  get textContent() { return this.own + this.children.map(child => child.textContent).join(""); }
  set textContent(text) { this.own = text; this.children = []; }
  all(name) { return this.children.flatMap(child => [...(child.name === name ? [child] : []), ...child.all(name)]); }
}
const places = {};
const byId = id => places[id] ??= new Node(id);
globalThis.innerWidth = 1000;
globalThis.addEventListener = () => {};
globalThis.document = {
  getElementById: byId, createElement: name => new Node(name), createElementNS: (space, name) => new Node(name),
  querySelectorAll: () => byId("why-not").all("tr"),
};
const [data, script] = JSON.parse(require("fs").readFileSync(0, "utf8"));
byId("plan").textContent = data;
for (const one of JSON.parse(data).why_not) byId("why-not").appendChild(new Node("tr"));
new Function(script)();
const rows = () => byId("body").all("tr").map(row => row.all("td")[1].own);
const seen = () => ({
  name: byId("name").textContent, toml: byId("toml").textContent, rows: rows(), promise: byId("promise").textContent,
  memory: byId("memory").all("rect").length, bars: byId("step").textContent, points: byId("trade").all("circle").length,
  ys: byId("trade").all("circle").map(dot => +dot.attributes.cy), many: byId("count").textContent,
});
const said = [seen()];
byId("body").all("tr")[1].click();
said.push(seen());
const sort = name => byId("head").all("button").find(button => button.textContent === name).click();
sort("step"); sort("step");
said.push(seen());
byId("body").all("input")[0].click();
said.push(seen());
byId("filter").value = "FULL 5.60"; byId("filter").listeners.input();
said.push(seen());
byId("filter").value = ""; byId("filter").listeners.input();
byId("fitting").checked = true; byId("fitting").listeners.change();
byId("why-not").all("tr")[0].click();
said.push(seen());
console.log(JSON.stringify(said));
"""


@pytest.fixture(scope="module")
def report() -> PlanReport:
    made = report_of(plans.run(), plans.hardware(), plans.found())
    return replace(made, placement=replace(made.placement, advice="tensor <ranks> are a node"))


class Parts(HTMLParser):
    """Texts by the element they stand in, and everything that would be loaded."""

    def __init__(self, text: str):
        super().__init__()
        self.texts: dict[str, str] = {}
        self.loaded: list[str] = []
        self.place = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.loaded += [str(known[key]) for key in ("src", "href") if key in known]
        self.place = known.get("id") or (tag if tag in ("script", "style", "h1") else self.place)

    def handle_data(self, data: str) -> None:
        self.texts[self.place] = self.texts.get(self.place, "") + data


def run_page(parts: Parts) -> list[dict[str, Any]]:
    """What the page shows: as it comes, after a row was clicked, sorted, hidden, filtered, and a reason clicked."""
    done = subprocess.run(
        ["node", "-e", DOM],
        input=json.dumps([parts.texts["plan"], parts.texts["script"]]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = json.loads(done.stdout)
    return seen


def test_page_holds_the_numbers_and_loads_nothing(report: PlanReport) -> None:
    text = page(report)
    parts = Parts(text)
    assert parts.loaded == [] and "@import" not in text and "url(" not in text
    assert [address for address in re.findall(r"https?://[^\s\"']+", text) if "www.w3.org/2000/svg" not in address] == []
    assert parts.texts["h1"].startswith("llama3-405b on 16,384 × H100 SXM")
    for number in ("5.00 s", "4.00 – 6.00 s", "61.0 GiB", "$47.2M", "42.0%", "60.0 d", "5 min 28 s"):
        assert number in parts.texts["promise"], number
    assert 'schedule = "interleaved-1f1b"' in parts.texts["toml"]
    assert "+38 % exposed communication" in parts.texts["why-not"] and "layout.tensor=16" in parts.texts["why-not"]
    assert "tensor &lt;ranks&gt; are a node" in text and "374,400 legal layouts evaluated" in text
    assert json.loads(parts.texts["plan"]) == page_data(report)


def test_page_data_has_each_candidate_once_under_its_first_role(report: PlanReport) -> None:
    data = page_data(report)
    assert [candidate["role"] for candidate in data["candidates"]] == ["winner", "runner-up", "runner-up"]
    best = data["candidates"][0]
    assert sum(part["value"] for part in best["memory"]["parts"]) == best["memory"]["end"] == 61 * plans.GIB
    assert sum(part["value"] for part in best["step"]["parts"]) == pytest.approx(best["step"]["end"])
    assert [point["line"] for point in data["trade"]["points"]] == [True, True, False]  # both of the curve, not TP16
    assert all(len(candidate["cells"]) == len(data["columns"]) for candidate in data["candidates"])


def test_page_uses_units_that_suit_the_size_and_shows_recomputed_fraction(report: PlanReport) -> None:
    assert "memory of the fullest rank, GiB" in page(report) and "a step, s;" in page(report)
    best = plans.option(seconds=0.2, low=0.1, high=0.3, memory={"fixed": 300 * 2.0**20}, recompute="full", recompute_every=2)
    small = replace(report, best=best, runners_up=(), alternatives=(), curve=())
    assert "memory of the fullest rank, MiB" in page(small) and "a step, ms;" in page(small)
    (candidate,) = page_data(small)["candidates"]
    assert "full 1/2" in [cell["text"] for cell in candidate["cells"]] and "recompute_every = 2" in candidate["toml"]
    assert [part["label"] for part in candidate["memory"]["parts"]] == ["driver and fragmentation"]


def test_page_escapes_names(report: PlanReport) -> None:
    bad = "</script><script>alert(1)</script>"
    other = replace(report.alternatives[0], name=bad, reason=bad)
    run = replace(report.run, model=replace(report.run.model, preset=bad))
    text = page(replace(report, run=run, assumptions=(bad,), alternatives=(other,)))
    assert text.count("<script") == 2 and "alert(1)</script>" not in text


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_page_script_draws_chooses_sorts_and_hides(report: PlanReport) -> None:
    first, chosen, by_time, hidden, filtered, why_not = run_page(Parts(page(report)))
    best, flat, wide = (candidate.name for candidate in (report.best, *report.runners_up))
    assert first["name"] == f"{best} (winner)" and first["rows"] == [best, flat, wide]
    assert first["memory"] == 18 and first["points"] == 3 and "5.60 s" in first["bars"]
    assert first["ys"][1] < first["ys"][0] < first["ys"][2]  # slower is higher up; the winner is drawn last, above the others
    assert chosen["name"] == f"{flat} (runner-up)" and "pipeline = 8" in chosen["toml"] and "4.50 – 6.70 s" in chosen["promise"]
    assert by_time["rows"] == [wide, flat, best]  # twice clicked: slowest first
    assert hidden["memory"] == 12 and wide not in hidden["bars"]
    assert filtered["rows"] == [flat] and filtered["many"] == "1 of 3"
    assert why_not["name"] == f"{wide} (runner-up)" and wide in why_not["bars"]  # a click on TP16 draws it again


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_page_script_marks_and_filters_candidates_that_do_not_fit(report: PlanReport) -> None:
    large = plans.option(micro_batch=2, memory={"activations": 90 * plans.GIB})
    other = Alternative(name="micro-batch 2", reason="needs 90.0 GiB", candidate=large)
    parts = Parts(page(replace(report, alternatives=(other,))))
    *_, last = run_page(parts)
    assert last["name"] == f"{large.name} (why not micro-batch 2, does not fit)"
    assert last["many"] == "3 of 4"
