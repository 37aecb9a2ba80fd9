"""The page of `phalanx watch` in a real browser: headless Chromium, driven by Playwright.

Skipped where one of them is missing: `pip install playwright`, and Debian's package chromium or $PHALANX_CHROMIUM. The accessibility check also
needs `npm ci` in frontend/.
"""

from __future__ import annotations

import csv
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Started, Workshop
from watch_runs import Record, serving, started, step, write_run

from phalanx.events.records import Evaluated, FailureNoticed, Recovered, Step
from phalanx.events.timeline_files import Author, RankStep, Span, TimelineWriter

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright drives the browser")
CHROMIUM = os.environ.get("PHALANX_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = ("overview", "promise", "ranks", "failures", "checkpoints", "data", "samples", "experts", "pipeline")
DRAWN = "() => [...document.querySelectorAll('.plot, .drawing')].every(place => place.querySelector('canvas, svg'))"
STEP = "Number(document.querySelector('.status b').textContent.split(' ')[1].replace(',', ''))"
PROGRAM = [sys.executable, "-m", "phalanx"]
SCRIPT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: install Debian's package chromium, or set $PHALANX_CHROMIUM")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; afterwards no page has reported an error."""
    errors: list[str] = []
    contexts = []

    def open_(address: str, *, width: int = 1280, theme: str = "light", tolerant: bool = False) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        if not tolerant:
            page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(tmp_path / "workshop")
    yield made
    made.close()


def full_run() -> list[Record]:
    """A run with something to show in every view, and hostile text where text comes from outside."""
    layout = started()["layout"] | {"pipeline": 2, "data": 2, "tensor": 2, "shard": 2}
    records: list[Record] = [
        started(ranks=16, layout=layout, accumulation=4, steps=400),
        {"event": "data_opened", "time": 0.0, "documents": 7, "tokens": 10**6, "run_tokens": 10**5, "parameters": 1000},
    ]
    for rank in range(16):
        records += [
            {
                "event": "worker_started",
                "time": 1.0,
                "rank": rank,
                "host": f"{SCRIPT}-{rank // 8}",
                "pid": rank,
                "device": "cpu",
            },
            {
                "event": "model_placed",
                "time": 1.0,
                "rank": rank,
                "applied": {"data": SCRIPT},
                "parameters": 5,
                "gradients": 6,
                "optimizer": 7,
            },
            {
                "event": "step_accounted",
                "time": 1.0,
                "step": 2,
                "rank": rank,
                "sent": {"data": {"all-reduce": 7}},
                "memory": {"parameters": 100, "activations": 5 + rank},
                "flops": {"all": 9},
            },
            {
                "event": "step_timed",
                "time": 1.0,
                "step": 3,
                "rank": rank,
                "seconds": 2.0,
                "parts": {"compute": 1 + rank / 20, "data": 0.5, "bubble": 0.2},
            },
        ]
    for number in range(1, 301):
        records.append(step(number, loss=5 / number**0.3, grad_norm=1 + 1 / number, expert_load=1.5 + 1 / number))
        if number % 20 == 0:
            tokens = {f"blocks.{layer}": [100, 100 + 2 * number if layer == 2 else 100, 100, 100] for layer in range(1, 5)}
            records.append(
                {
                    "event": "expert_loads",
                    "time": 2.0 * number,
                    "step": number,
                    "steps": 20,
                    "tokens": tokens | {SCRIPT: [1, 1]},
                }
            )
        if number % 50 == 0:
            records.append(
                {
                    "event": "evaluated",
                    "time": 2.0 * number,
                    "step": number,
                    "loss": 5.1 / number**0.3,
                    "sources": {name: {"loss": 5.0 / number**0.3} for name in ("wiki", SCRIPT)},
                }
            )
            records.append(
                {
                    "event": "saved",
                    "time": 2.0 * number,
                    "step": number,
                    "path": f"/x/step-{number:08d}",
                    "bytes": 10**9,
                    "seconds": 3.0,
                    "stall": 0.1,
                    "bytes_per_second": 1e9,
                }
            )
            records.append(
                {
                    "event": "copied",
                    "time": 2.0 * number,
                    "step": number,
                    "bytes": 10**9,
                    "seconds": 1.0,
                    "stall": 0.01,
                    "peer": True,
                }
            )
            records.append(
                {
                    "event": "sampled",
                    "time": 2.0 * number,
                    "step": number,
                    "prompt": "def ",
                    "text": SCRIPT,
                    "tokens": 9,
                    "seconds": 1.0,
                }
            )
        if number in (90, 200):
            failure = number // 90
            records.append(
                {
                    "event": "failure_noticed",
                    "time": 2.0 * number,
                    "number": failure,
                    "cause": "died",
                    "message": f"rank 3 died: {SCRIPT}",
                    "rank": 3,
                    "step": number,
                    "traceback": f"Traceback\n{SCRIPT}",
                }
            )
            records.append({"event": "restored", "time": 2.0 * number, "step": number - 10, "path": "memory", "seconds": 0.5})
            records += [step(again, 2.0 * number, loss=5 / again**0.3) for again in range(number - 9, number + 1)]
            records.append({
                "event": "recovered", "time": 2.0 * number, "failures": [failure], "action": "restart", "generation": failure, "ranks": 16, "layout": layout, "source": "memory",
                "step": number - 10, "steps_lost": 10, "noticed": 2.0 * number, "decided": 2.0 * number + 1, "restarted": 2.0 * number + 3, "first_step": 2.0 * number + 4, "seconds": 4.0,
            })  # fmt: skip
    records.append(
        {
            "event": "straggling",
            "time": 600.0,
            "rank": 15,
            "node": 1,
            "step": 300,
            "factor": 1.6,
            "message": f"rank 15 is slow {SCRIPT}",
        }
    )
    records.append(
        {"event": "step_skipped", "time": 601.0, "step": 301, "samples": 1, "loss": "nan", "grad_norm": "inf", "in_a_row": 1}
    )
    return records  # fmt: skip


@pytest.fixture
def full(tmp_path: Path) -> Iterator[str]:
    """The address of a server with two runs."""
    write_run(tmp_path / "runs" / "full", full_run(), '[train]\nbatch = 8\n[data]\nsource = "text"\n')
    for rank in range(16):
        author = Author(rank=rank, ranks=16, node=0, host="a", boot="b", generation=0, launch="one", wall=0.0, monotonic=0.0)
        writer = TimelineWriter(tmp_path / "runs" / "full", author, keep=100)
        actions = [Span(0.1 * at, 0.1 * at + 0.09, "work", f"{rank // 8}{'FB'[at % 2]}{at // 2}") for at in range(8)]
        for number in (298, 299, 300):
            phases = [Span(0.8, 0.9, "phase", "optimizer")]
            writer.add(partial(RankStep, step=number, begin=2.0 * number, seconds=0.9, spans=[*actions, *phases], calls=[]))
        writer.close()
    write_run(tmp_path / "runs" / "other", [started(), *(step(number) for number in range(1, 60))], "[train]\nbatch = 16\n")
    with serving(tmp_path / "runs") as client:
        yield f"http://127.0.0.1:{client.port}/"


def shown(page: Any, view: str) -> None:
    page.wait_for_selector(f"nav a[aria-current=page]:has-text('{view.capitalize()}')")
    page.wait_for_selector("main .figures, main .card, main .charts")


def axe(page: Any) -> list[str]:
    """What is seriously wrong for people who cannot see or use a mouse."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{item['id']}: {item['nodes'][0]['html'][:200]}"
        for item in found["violations"]
        if item["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_is_drawn_and_accessible(full: str, open_page: Callable[..., Any], theme: str, width: int) -> None:
    page = open_page(f"{full}#/run/full/overview", theme=theme, width=width)
    shown(page, "overview")
    problems = []
    for view in VIEWS:
        page.click(f"nav a:has-text('{view.capitalize()}')")
        shown(page, view)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{view} is wider than the screen"
        assert page.locator("text=cannot be drawn").count() == 0
        if AXE.exists():
            problems += [f"{view}: {problem}" for problem in axe(page)]
    page.click("nav a:has-text('Compare')")
    page.wait_for_selector("text=differences of their run files")
    page.goto(f"{full}#/")
    page.wait_for_selector("a:has-text('other')")
    if AXE.exists():
        problems += axe(page)
    assert problems == []
    assert page.title() != "owned"


def test_text_of_events_never_becomes_part_of_the_page(full: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{full}#/run/full/failures?failure=1")
    page.wait_for_selector("details[open] pre:has-text('Traceback')")
    assert SCRIPT in page.inner_text("details[open] pre")
    for view in ("ranks?rank=3", "samples", "data"):
        page.goto(f"{full}#/run/full/{view}")
        page.wait_for_selector("main .card")
        page.wait_for_timeout(400)
    assert page.locator("img").count() == 0 and page.title() != "owned"


def test_keys_links_and_zoom(full: str, open_page: Callable[..., Any]) -> None:
    page = open_page(full)
    page.wait_for_selector("a:has-text('full')")
    page.goto(f"{full}#/run/full/overview")
    shown(page, "overview")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("2")
    shown(page, "promise")
    page.keyboard.press("1")
    shown(page, "overview")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    chart = page.locator(".plot").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".readout:has-text('step 299')")
    page.keyboard.press("+")
    page.wait_for_function("() => location.hash.includes('from=')")
    page.wait_for_selector("button:has-text('whole range')")
    link = page.url
    other = open_page(link)
    other.wait_for_selector("button:has-text('whole range')")
    other.locator(".plot").first.focus()
    other.keyboard.press("Home")
    other.wait_for_function(
        "() => { const found = /step (\\d+)/.exec(document.querySelector('.readout').textContent); return found && Number(found[1]) > 100; }"
    )
    page.goto(f"{full}#/run/full/ranks")
    shown(page, "ranks")
    page.locator(".grid").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("h2:text-is('rank 1')")


def test_a_zoom_is_drawn_before_the_server_answers_and_asked_for_once(full: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{full}#/run/full/overview")
    shown(page, "overview")
    page.wait_for_function(DRAWN)
    held: list[Any] = []
    page.route(lambda url: "from=" in url and "/api/" in url, lambda route: held.append(route))
    box = page.locator(".wide .u-over").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.5 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], y)
    page.mouse.move(box["x"] + 0.75 * box["width"], y)
    page.mouse.up()
    page.wait_for_selector("button:has-text('whole range')")
    chart = page.locator(".plot").first
    chart.focus()
    for key, low, high in (("Home", 148, 153), ("End", 222, 227)):  # of 300 steps
        page.keyboard.press(key)
        step = int(page.inner_text(".readout >> nth=0").split("·")[0].split()[1])
        assert low <= step <= high
        left = page.evaluate("() => document.querySelector('.wide .u-cursor-x').style.transform")
        at = float(left.split("(")[1].split("px")[0]) / box["width"]
        assert at < 0.05 if key == "Home" else at > 0.95, "the axis has the new range"
    assert len(held) == 1, "one chart asks for all"
    held[0].continue_()
    page.unroute_all()
    page.locator("button:has-text('whole range')").first.click()
    page.wait_for_selector("button:has-text('whole range')", state="detached")
    chart.focus()
    page.keyboard.press("Home")
    page.wait_for_selector(".readout:has-text('step 1 ')")


def test_a_layer_of_experts_is_chosen_by_mouse_and_by_keyboard(full: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{full}#/run/full/experts")
    page.wait_for_selector("h2:text-is('experts of blocks.2')")  # the worst one
    assert page.locator("table tbody tr").first.inner_text().split("\t")[:3] == ["blocks.2", "1", "2.80 ×"]
    layers = page.locator(".grid").first
    layers.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".readout:has-text('layer blocks.2, steps 281 to 300: 2.80 ×')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".readout:has-text('layer blocks.2, steps 261 to 280: 2.75 ×')")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".readout:has-text('layer blocks.3, steps 261 to 280: 1.00 ×')")
    page.keyboard.press("Enter")
    page.wait_for_selector("h2:text-is('experts of blocks.3')")
    box = layers.locator("canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 1.5 * 18)
    page.wait_for_selector("h2:text-is('experts of blocks.2')")
    assert "layer=1" in page.url
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 4.5 * 18)
    page.wait_for_selector(".readout:has-text('<img src=x')")
    assert page.locator("img").count() == 0 and page.title() != "owned"


def test_a_step_of_the_pipeline_is_chosen(full: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{full}#/run/full/pipeline")
    page.wait_for_selector("h2:text-is('step 300 as it was executed')")
    assert page.locator("svg >> nth=1").locator("text=rank 8").count() == 1, "the first pipeline has ranks 0 and 8"
    page.click("button[aria-label='step before']")
    page.wait_for_selector("h2:text-is('step 299 as it was executed')")
    assert "step=299" in page.url
    page.get_by_label("pipeline", exact=False).last.fill("7")
    page.keyboard.press("Tab")
    page.wait_for_selector("svg >> text=rank 15")
    page.click("button:has-text('newest')")
    page.wait_for_selector("h2:text-is('step 300 as it was executed')")


def test_charts_are_saved_as_pictures_and_numbers(full: str, open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = open_page(f"{full}#/run/full/overview")
    saved = 0
    for view in ("overview", "promise", "ranks", "failures", "checkpoints", "data", "experts", "pipeline"):
        page.goto(f"{full}#/run/full/{view}")
        shown(page, view)
        page.wait_for_function(DRAWN)
        for kind in ("PNG", "CSV"):
            for button in page.locator(f".card-head button:text-is('{kind}')").all():
                download = downloaded(page, button)
                file = tmp_path / f"{saved}.{kind}"
                download.save_as(file)
                saved += 1
                if kind == "PNG":
                    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 1500, download.suggested_filename
                else:
                    rows = list(csv.reader(file.read_text().splitlines()))
                    assert len(rows) > 1 and all(len(row) == len(rows[0]) for row in rows)
                    if download.suggested_filename == "loss.csv":
                        numbers = {int(row[0]): float(row[1]) for row in rows[1:] if row[-1] != "held-out loss" and row[1]}
                        assert numbers[64] == pytest.approx(5 / 64**0.3, rel=1e-6)
    assert saved >= 30


def downloaded(page: Any, button: Any) -> Any:
    """What a button saves. Chromium may drop a download that follows another too fast."""
    for _ in range(3):
        try:
            with page.expect_download(timeout=5000) as waiting:
                button.click()
            return waiting.value
        except playwright.TimeoutError:
            continue
    raise AssertionError(f"{button.get_attribute('aria-label')} saves nothing")


def server_of(workshop: Workshop, port: int = 0) -> tuple[Started, str]:
    """`phalanx watch` of the folder's runs, at this port; its address."""
    command = workshop.start("watch", "runs", "--port", port, "--json", program=PROGRAM)
    command.until(lambda: command.output().out.endswith("\n"), "its address")
    return command, command.output().json["address"]


def end(command: Started) -> None:
    command.process.send_signal(signal.SIGTERM)
    command.wait()


def step_shown(page: Any) -> int:
    return int(page.inner_text(".status b").split()[1].replace(",", ""))


def test_a_live_run_updates_by_itself_and_outlives_its_server(workshop: Workshop, open_page: Callable[..., Any]) -> None:
    """The page follows a run on two ranks; a kill and its recovery appear within 2 s; a reload and a restart of the server change nothing."""
    (workshop.path / "runs").mkdir()
    server, address = server_of(workshop)
    page = open_page(address, tolerant=True)
    page.wait_for_selector("text=There is no run in this folder yet")
    chaos = (
        "--chaos",
        "kill rank=1 step=40",
        "layout.data=2",
        "train.steps=100000",
        "train.eval_every=50",
        "cluster.cpu_ranks=2",
    )
    run = workshop.start("train", workshop.run_file.name, *chaos, program=PROGRAM)
    page.wait_for_selector(".status b", timeout=120_000)  # the only run opens by itself
    failed = appears(page, workshop, FailureNoticed, "nav .count:has-text('1')")
    page.click("nav a:has-text('Failures')")
    recovered = appears(page, workshop, Recovered, ".entry:has-text('restart in')")
    print(f"the failure appeared after {failed:.2f} s, the recovery after {recovered:.2f} s")
    assert max(failed, recovered) < 2.0
    page.click("nav a:has-text('Overview')")
    page.wait_for_selector(".wide .uplot")
    before = step_shown(page)
    page.wait_for_function(
        f"() => {STEP} > {before + 20}",
        timeout=60_000,
    )
    page.reload()
    page.wait_for_selector(".wide .uplot")
    port = int(address.rsplit(":", 1)[1].strip("/"))
    end(server)
    page.wait_for_selector("text=The server does not answer", timeout=15_000)
    before = step_shown(page)
    server, again = server_of(workshop, port)
    assert again == address
    page.wait_for_selector("text=The server does not answer", state="detached", timeout=15_000)
    page.wait_for_function(
        f"() => {STEP} > {before}",
        timeout=60_000,
    )
    run.process.send_signal(signal.SIGTERM)
    assert run.wait().code == 75
    page.wait_for_selector(".status .state:has-text('stopped')", timeout=15_000)
    end(server)


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
MINUTES = 15 * 60_000
"""Milliseconds: it takes about one minute on an idle machine."""


def test_the_quickstart_is_followed_from_its_first_step_to_its_end(workshop: Workshop, open_page: Callable[..., Any]) -> None:
    """As it stands in the repository, on 4 ranks, one of which is killed. Nobody touches the page, but to look at another view."""
    (workshop.path / "runs").mkdir()
    server, address = server_of(workshop)
    page = open_page(address)
    page.wait_for_selector("text=There is no run in this folder yet")
    run = workshop.start("train", QUICKSTART, "--chaos", "kill rank=1 step=40", program=PROGRAM)
    page.wait_for_selector(".wide .uplot canvas", timeout=MINUTES)
    seen = step_shown(page)
    assert seen < 40, "the page has come with the first steps"
    failed = appears(page, workshop, FailureNoticed, "nav .count:has-text('1')", MINUTES / 1000)
    page.click("nav a:has-text('Failures')")
    recovered = appears(page, workshop, Recovered, ".entry:has-text('restart in')", MINUTES / 1000)
    print(f"the failure appeared after {failed:.2f} s, the recovery after {recovered:.2f} s")
    assert max(failed, recovered) < 2.0
    page.click("nav a:has-text('Overview')")
    for more in (60, 120, 200):
        page.wait_for_function(f"() => {STEP} >= {more}", timeout=MINUTES)
    assert run.wait().code == 0
    page.wait_for_selector(".status .state:has-text('finished')", timeout=15_000)
    assert step_shown(page) == 300
    steps = [event for event in workshop.events("runs/quickstart") if isinstance(event, Step)]
    evaluated = [event for event in workshop.events("runs/quickstart") if isinstance(event, Evaluated)]
    figures = page.locator(".figure dd").all_inner_texts()
    assert f"{steps[-1].loss:.4f}" in figures and f"{evaluated[-1].loss:.4f}" in figures
    page.close()  # it would ask on
    end(server)


def appears(page: Any, workshop: Workshop, kind: type[Any], selector: str, patience: float = 120) -> float:
    """Seconds from a record to its appearance on the page."""
    deadline = time.monotonic() + patience
    while not page.locator(selector).count():
        assert time.monotonic() < deadline, f"{selector} did not appear"
        page.wait_for_timeout(20)
    seen = time.time()
    (path,) = (workshop.path / "runs").glob("*/events.jsonl")
    return float(seen - next(event.time for event in workshop.events(path.parent) if isinstance(event, kind)))


def test_a_token_lets_in_once_and_for_all(workshop: Workshop, open_page: Callable[..., Any]) -> None:
    write_run(workshop.path / "runs" / "a", [started(), *(step(number) for number in range(1, 9))])
    command = workshop.start("watch", "runs", "--port", 0, "--token", "--json", program=PROGRAM)
    command.until(lambda: command.output().out.endswith("\n"), "its address")
    where = command.output().json
    page = open_page(where["address"])
    page.wait_for_selector(".wide .uplot")
    assert where["token"] not in page.url
    page.reload()
    page.wait_for_selector(".wide .uplot")
    stranger = open_page(f"http://127.0.0.1:{where['port']}/", tolerant=True)
    assert "needs its token" in stranger.inner_text("body")
    end(command)
