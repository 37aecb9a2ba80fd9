"""Segment between two failures in closed form, against steps that are taken one by one."""

from __future__ import annotations

from random import Random

from phalanx.planning.simulate.simulated_run import SaveSchedule, Segment


def one_by_one(saves: SaveSchedule, first: int, step: float, seconds: float) -> tuple[int, int | None, int | None]:
    """The last step that is done, and those that copies in memory and complete checkpoints are of."""
    now, done, memory, disk = 0.0, first, None, None
    written: list[tuple[float, int]] = []
    while True:
        now += step
        number = done + 1
        in_memory = saves.memory_every is not None and number % saves.memory_every == 0
        on_disk = saves.disk_every is not None and number % saves.disk_every == 0
        now += (saves.memory_stall if in_memory else 0.0) + (saves.disk_stall if on_disk else 0.0)
        if now > seconds:
            break
        done = number
        memory = number if in_memory else memory
        if on_disk:
            written.append((now + saves.disk_write, number))
    disk = max((number for when, number in written if when <= seconds), default=None)
    return done, memory, disk


def test_steps_and_saves_are_counted_as_if_they_were_taken() -> None:
    dice = Random(0)
    for _ in range(300):
        saves = SaveSchedule(
            keep="memory",
            memory_every=dice.choice((None, 1, 3, 10)),
            memory_stall=dice.choice((0.0, 0.25)),
            disk_every=dice.choice((None, 2, 7, 25)),
            disk_stall=dice.choice((0.0, 0.5, 3.0)),
            disk_write=dice.choice((0.0, 4.0, 40.0)),
        )
        first, step, seconds = dice.randrange(50), dice.choice((0.5, 1.0, 2.25)), dice.randrange(1, 400) / 4 + 0.1
        progress = Segment(saves, first, step)
        done = progress.step_after(seconds)
        found = (
            done,
            progress.last_saved(saves.memory_every, 0.0, done, seconds),
            progress.last_saved(saves.disk_every, saves.disk_write, done, seconds),
        )
        assert found == one_by_one(saves, first, step, seconds)
        assert progress.seconds_until(done) <= seconds < progress.seconds_until(done + 1)
