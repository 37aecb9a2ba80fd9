"""What the page of a large run costs: a synthetic run of 100,000 steps on 1,024 ranks with 200 failures is written and served.

    python benchmarks/watch_page.py [--steps 100000] [--ranks 1024] [--failures 200] [--keep FOLDER] [--browser CHROMIUM]

Reports the size of the events; for a server that has just started and for one that has read them, the seconds until the overview is answered; how
long all is read; the slowest answer of each view, zoomed and not; the memory of the server. Checks figures of the page against a plain
computation from the events. With --browser (and the package playwright), also the seconds from the address to the drawn loss curve, and from a
zoom to the new range and to the data of the server, in that browser.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_START = 1_790_000_000.0
_STEP_SECONDS = 4.0
_LAYOUT = {
    "pipeline": 8, "data": 4, "shard": 8, "context": 1, "tensor": 4, "zero": 3, "sequence": True, "context_method": "ring", "schedule": "1f1b",
    "schedule_file": None, "stages": None, "stage_split": "counted", "expert": 1, "expert_tensor": 1,
}  # fmt: skip
_VIEWS = ("overview", "promise", "ranks", "failures", "checkpoints", "data", "samples", "experts", "pipeline")


def records(steps: int, ranks: int, failures: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The records of the run, as its controller would write them. After each failure a few steps are repeated."""
    dice, now, step = random.Random(seed), _START, 0
    layout = _LAYOUT | {"data": max(1, ranks // 256)}
    promise = {
        "seconds": 4.1, "low": 3.5, "high": 4.9, "tokens_per_second": 4_194_304 / 4.1, "total_memory": 6.1e10, "mfu": 0.41, "days": steps * 4.1 / 86400,
        "price": ranks * 2.5 * steps * 4.1 / 3600, "memory": {"parameters": 1e10, "gradients": 1e10, "optimizer": 2e10, "activations": 2e10, "fixed": 1e9},
        "split": {"compute": 3.2, "tensor": 0.4, "data": 0.2, "bubble": 0.3},
    }  # fmt: skip
    yield {
        "event": "run_started", "time": now, "version": "0.1.0", "ranks": ranks, "device": "cuda", "steps": steps, "parameters": 70_000_000_000, "micro_batch": 1,
        "accumulation": 16, "layout": layout, "compute": "bf16", "promise": promise, "program": [], "adapters": None, "saves": True,
    }  # fmt: skip
    yield {
        "event": "data_opened",
        "time": now,
        "documents": 10**9,
        "tokens": 10**13,
        "run_tokens": steps * 4_194_304,
        "parameters": 70_000_000_000,
    }
    broken = set(random.Random(seed + 1).sample(range(10, steps), failures)) if failures else set[int]()
    yield from _ranks(now, 1, ranks, dice)
    while step < steps:
        step, now = step + 1, now + _STEP_SECONDS * dice.uniform(0.9, 1.2)
        loss = 1.8 + 9 * (step + 30) ** -0.35 + dice.gauss(0, 0.02) + (3.0 if dice.random() < 1e-4 else 0.0)
        yield _step(step, now, loss, dice)
        if step % 1000 == 0:
            yield {
                "event": "evaluated",
                "time": now,
                "step": step,
                "loss": loss + 0.05,
                "tokens": 10**6,
                "seconds": 20.0,
                "perplexity": math.exp(loss),
                "sources": {},
            }
        if step % 500 == 0:
            yield {
                "event": "saved",
                "time": now,
                "step": step,
                "path": f"/runs/big/checkpoints/step-{step:08d}",
                "bytes": 10**12,
                "seconds": 90.0,
                "stall": 1.5,
            }
        if step in broken:
            broken.discard(step)
            rank, lost = dice.randrange(ranks), min(step - 1, dice.randrange(1, 40))
            number = failures - len(broken)
            yield {
                "event": "failure_noticed", "time": now, "number": number, "cause": "died", "message": f"rank {rank}: it was killed by SIGKILL", "rank": rank,
                "node": rank // 8, "step": step, "traceback": "Traceback (most recent call last):\n" + 30 * '  File "train.py", line 1, in step\n',
            }  # fmt: skip
            noticed, now = now, now + 60
            step -= lost
            yield {"event": "restored", "time": now, "step": step, "path": "memory", "seconds": 12.0}
            yield from _ranks(now, step, ranks, dice)
            yield {
                "event": "recovered", "time": now, "failures": [number], "action": "spare", "generation": number, "ranks": ranks, "layout": layout, "source": "memory",
                "step": step, "steps_lost": lost, "noticed": noticed, "decided": noticed + 1, "restarted": noticed + 40, "first_step": now, "seconds": 60.0,
            }  # fmt: skip
    yield {"event": "finished", "time": now, "step": step}


def _step(step: int, now: float, loss: float, dice: random.Random) -> dict[str, Any]:
    seconds = _STEP_SECONDS * dice.uniform(0.95, 1.1)
    return {
        "event": "step", "time": now, "step": step, "loss": loss, "tokens": 4_194_304, "samples": step * 512, "batch_digest": f"{dice.getrandbits(36):09x}",
        "learning_rate": 3e-4, "grad_norm": abs(dice.gauss(0.4, 0.1)), "seconds": seconds, "tokens_per_second": 4_194_304 / seconds, "flops_per_second": 4e17,
        "mfu": 0.4 * _STEP_SECONDS / seconds, "memory": 60_000_000_000 + dice.randrange(10**8), "expert_load": None, "preferred": None, "reward": None,
    }  # fmt: skip


def _ranks(now: float, step: int, ranks: int, dice: random.Random) -> Iterator[dict[str, Any]]:
    """What every rank reports after each start."""
    for rank in range(ranks):
        yield {
            "event": "worker_started",
            "time": now,
            "rank": rank,
            "host": f"node-{rank // 8:04d}.cluster.example",
            "pid": 4000 + rank,
            "device": "cuda",
        }
        yield {
            "event": "model_placed", "time": now, "rank": rank, "applied": {"tensor": "32 heads of 128 over 4 ranks", "fsdp": "80 units over 8 ranks"},
            "parameters": 10**10, "gradients": 10**10, "optimizer": 2 * 10**10, "files": 0,
        }  # fmt: skip
        yield {
            "event": "step_accounted", "time": now, "step": step + 1, "rank": rank, "sent": {"tensor": {"all-reduce": 10**9}, "data": {"reduce-scatter": 2 * 10**9}},
            "memory": {"parameters": 10**10, "gradients": 10**10, "optimizer": 2 * 10**10, "activations": 2 * 10**10}, "flops": {"all": 10**15, "repeated": 0},
        }  # fmt: skip
        compute = 3.2 * dice.uniform(0.98, 1.02) * (1.3 if rank == 77 else 1.0)
        parts = {
            "compute": compute,
            "tensor": 0.3,
            "data": max(0.01, 3.6 - compute),
            "bubble": 0.05,
            "optimizer": 0.03,
            "loading": 0.001,
            "other": 0.019,
        }
        yield {"event": "step_timed", "time": now, "step": step + 2, "rank": rank, "seconds": 4.0, "parts": parts}


def write_run(folder: Path, steps: int, ranks: int, failures: int) -> Path:
    """A run directory with the events and no other file that matters."""
    run = folder / "big"
    run.mkdir(parents=True)
    (run / "run.toml").write_text('[model]\npreset = "llama3-70b"\n\n[data]\nsource = "tokens"\n')
    with (run / "events.jsonl").open("w") as file:
        for record in records(steps, ranks, failures):
            file.write(json.dumps(record) + "\n")
    return run


def plain_figures(events: Path) -> dict[str, float]:
    """Figures computed in the straightforward way: every record, one after the other."""
    kept: dict[int, dict[str, Any]] = {}
    failures, lost, last = 0, 0, {}
    with events.open() as file:
        for line in file:
            record = json.loads(line)
            match record["event"]:
                case "step":
                    kept[record["step"]] = record
                case "restored":
                    kept = {step: value for step, value in kept.items() if step <= record["step"]}
                case "failure_noticed":
                    failures += 1
                case "recovered":
                    lost += record["steps_lost"]
                case "step_timed":
                    last[record["rank"]] = record["parts"]["compute"]
    losses = [kept[step]["loss"] for step in sorted(kept)]
    return {
        "steps": len(kept), "loss": losses[-1], "least": min(losses), "greatest": max(losses), "tokens": sum(each["tokens"] for each in kept.values()),
        "failures": failures, "lost": lost, "slowest": max(last, key=lambda rank: last[rank]),
    }  # fmt: skip


def page_figures(ask: Any) -> dict[str, float]:
    """The same figures from the page's own answers."""
    overview, failures, ranks = (ask(view) for view in ("overview", "failures", "ranks"))
    curve = overview["curve"]["y"]["loss"]
    computing = ranks["metrics"][0]["values"]
    return {
        "steps": overview["curve"]["rows"], "loss": overview["figures"]["loss"], "least": min(curve.get("min", curve["mean"])),
        "greatest": max(curve.get("max", curve["mean"])), "tokens": overview["figures"]["tokens"], "failures": failures["total"],
        "lost": failures["figures"]["steps_lost"], "slowest": computing.index(max(computing)),
    }  # fmt: skip


class Server:
    """`phalanx watch` as a process."""

    def __init__(self, folder: Path):
        command = [sys.executable, "-m", "phalanx", "watch", str(folder), "--port", "0", "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def ask(self, view: str, query: str = "") -> Any:
        with urllib.request.urlopen(f"{self.address}api/view?run=big&view={view}&width=800{query}") as answer:
            return json.loads(answer.read())

    def timed(self, view: str, query: str = "") -> float:
        begin = time.perf_counter()
        self.ask(view, query)
        return time.perf_counter() - begin

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Browser:
    """A Chromium with one page."""

    def __init__(self, chromium: str):
        from playwright.sync_api import sync_playwright

        self._driver = sync_playwright().start()
        self._browser = self._driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        self.page = self._browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.goto("about:blank")

    def first_picture(self, server: Server) -> float:
        """Seconds from the address to the loss curve."""
        begin = time.perf_counter()
        self.page.goto(f"{server.address}#/run/big/overview")
        self.page.wait_for_selector(".wide .uplot canvas")
        return time.perf_counter() - begin

    def zooms(self) -> list[tuple[float, float]]:
        """Drags over the loss curve, with a return to the whole range after each. Seconds from the release of the button to the frame with the new
        range, and to that with the data of the server: the last one that was drawn."""
        self.page.wait_for_timeout(1500)
        self.page.evaluate(_WATCH_DRAWING)
        box = self.page.locator(".wide .u-over").first.bounding_box()
        assert box is not None
        times = []
        for part in range(_ZOOMS):
            x, y = box["x"] + box["width"] * (0.02 + 0.8 * part / _ZOOMS), box["y"] + box["height"] / 2
            self.page.mouse.move(x, y)
            self.page.mouse.down()
            self.page.mouse.move(x + 0.05 * box["width"], y)
            self.page.mouse.move(x + 0.1 * box["width"], y)
            self.page.mouse.up()
            self.page.wait_for_timeout(_SETTLED)
            first, last = self.page.evaluate("[drawn.first - drawn.begin, drawn.last - drawn.begin]")
            times.append((first / 1000, last / 1000))
            self.page.locator("button:text-is('whole range')").first.click()
            self.page.wait_for_timeout(_SETTLED)
        return times

    def close(self) -> None:
        self._browser.close()
        self._driver.stop()


_ZOOMS = 20
_SETTLED = 800
"""Milliseconds after which nothing more is drawn."""
# A chart is drawn when its canvas is cleared; what was drawn is seen when the task after the next frame runs.
_WATCH_DRAWING = """() => {
    window.drawn = { begin: 0, first: 0, last: 0 };
    addEventListener("mouseup", () => { drawn = { begin: performance.now(), first: 0, last: 0 }; }, true);
    const canvas = document.querySelector(".wide .uplot canvas"), clear = CanvasRenderingContext2D.prototype.clearRect;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) {
        if (this.canvas === canvas || this.canvas.closest(".wide")) requestAnimationFrame(() => setTimeout(() => { drawn.last = performance.now(); drawn.first ||= drawn.last; }));
        return clear.apply(this, box);
    };
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 256")
    parser.add_argument("--failures", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="folder to write the run to, or one that has it")
    parser.add_argument("--browser", help="path of a Chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        run = folder / "big"
        if not run.exists():
            write_run(folder, options.steps, options.ranks, options.failures)
        print(f"events: {(run / 'events.jsonl').stat().st_size / 2**20:.0f} MiB")
        browser = Browser(options.browser) if options.browser else None
        if browser is not None:
            fresh = Server(folder)
            print(f"in a browser: first picture of a server that has read nothing {browser.first_picture(fresh):.2f} s")
            fresh.close()
        server = Server(folder)
        try:
            report(server, run / "events.jsonl", browser)
        finally:
            server.close()
            if browser is not None:
                browser.close()


def report(server: Server, events: Path, browser: Browser | None) -> None:
    begin = time.perf_counter()
    first = server.timed("overview")
    print(f"first overview of a server that has read nothing: {first:.2f} s")
    curve_done = None
    while (header := server.ask("overview")["header"])["progress"] < 1 or not header["ranks_known"]:
        if curve_done is None and header["step"] and header["state"] == "finished":
            curve_done = time.perf_counter() - begin
        time.sleep(0.2)
    print(
        f"all steps read after {curve_done or time.perf_counter() - begin:.1f} s, all ranks after {time.perf_counter() - begin:.1f} s"
    )
    for view in _VIEWS:
        times = [server.timed(view, f"&from={low}&to={low + 20_000}") for low in range(0, 80_000, 20_000)]
        print(f"  {view}: {1e3 * server.timed(view):.0f} ms, zoomed {1e3 * max(times):.0f} ms")
    print(f"  a rank: {1e3 * server.timed('rank', '&rank=77'):.0f} ms")
    print(f"memory of the server: {psutil.Process(server.process.pid).memory_info().rss / 2**20:.0f} MiB")
    expected, shown = plain_figures(events), page_figures(server.ask)
    for name, value in expected.items():
        assert math.isclose(shown[name], value, rel_tol=1e-6), f"{name}: the page has {shown[name]}, the events {value}"
    print(f"figures equal to those of the events: {', '.join(expected)}")
    if browser is not None:
        print(f"in a browser: first picture of a server that has read all {browser.first_picture(server):.2f} s")
        for what, zooms in zip(("the new range", "the data of the server"), zip(*browser.zooms(), strict=True), strict=True):
            middle, slowest = sorted(zooms)[len(zooms) // 2], max(zooms)
            print(f"in a browser: zoom to {what} {1e3 * middle:.0f} ms, the slowest of {len(zooms)} {1e3 * slowest:.0f} ms")


if __name__ == "__main__":
    main()
