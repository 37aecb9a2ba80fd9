"""Progress between two failures in closed form, against steps that are taken one by one."""

from __future__ import annotations

from random import Random

from phalanx.planning.simulate.simulated_saves import Progress, Saves


def one_by_one(saves: Saves, first: int, step: float, seconds: float) -> tuple[int, int | None, int | None]:
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
        saves = Saves(
            keep="memory",
            memory_every=dice.choice((None, 1, 3, 10)),
            memory_stall=dice.choice((0.0, 0.25)),
            disk_every=dice.choice((None, 2, 7, 25)),
            disk_stall=dice.choice((0.0, 0.5, 3.0)),
            disk_write=dice.choice((0.0, 4.0, 40.0)),
        )
        first, step, seconds = dice.randrange(50), dice.choice((0.5, 1.0, 2.25)), dice.randrange(1, 400) / 4 + 0.1
        progress = Progress(saves, first, step)
        done = progress.after(seconds)
        found = (
            done,
            progress.saved(saves.memory_every, 0.0, done, seconds),
            progress.saved(saves.disk_every, saves.disk_write, done, seconds),
        )
        assert found == one_by_one(saves, first, step, seconds)
        assert progress.reached(done) <= seconds < progress.reached(done + 1)
        assert abs(progress.stalled(done) + (done - first) * step - progress.reached(done)) < 1e-9
