"""All views of a digest, as the server computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.watch import plan_views, run_views
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.run_digest import Digest
from phalanx.watch.run_views import Window

VIEWS = {
    "overview": run_views.overview, "promise": plan_views.promise, "ranks": plan_views.ranks, "failures": run_views.failures,
    "checkpoints": run_views.checkpoints, "data": run_views.data, "samples": run_views.samples, "experts": run_views.experts,
    "pipeline": plan_views.pipeline,
}  # fmt: skip


def every_view(digest: Digest, path: Path = Path("/nonexistent/run")) -> dict[str, Any]:
    """By name. The directory of the run has no files."""
    run = FollowedRun("made-up", path)
    run.digest = digest
    window = Window(width=200)
    made: dict[str, Any] = {name: view(run, window) for name, view in VIEWS.items()}
    return made | {"header": run_views.header(run), "rank": plan_views.rank_story(run, 1)}
