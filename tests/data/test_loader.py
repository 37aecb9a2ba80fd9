from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from phalanx.data.corpus import MemoryCorpus
from phalanx.data.loader import Loader, ReplicaShare
from phalanx.data.pack import Batch, StreamPacking
from phalanx.data.samples import Samples, split

TEXTS = ["".join(chr(97 + (i * j) % 26) for j in range(1, 60 + i)) for i in range(1, 30)]
DOCUMENTS = MemoryCorpus(TEXTS)
SAMPLES = Samples(StreamPacking(DOCUMENTS, split(DOCUMENTS.blocks, 0.0, 0)[0], 12), 9, shuffle=True)
ALONE = ReplicaShare(batch=4, replica=0, replicas=1, micro_batch=2)


def same(batch: Batch) -> Batch:
    return batch


def loader(share: ReplicaShare = ALONE, *, start: int = 0, prefetch: int = 2) -> Loader[Batch]:
    return Loader(SAMPLES, share, start=start, prefetch=prefetch, prepare=same)


BEFORE: set[threading.Thread] = set()
"""Threads that are there when a test begins: other tests of this process may have left trainers that nobody has collected yet."""


@pytest.fixture(autouse=True)
def before() -> None:
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def threads() -> int:
    return sum(thread.name.startswith("loader") for thread in set(threading.enumerate()) - BEFORE)


def wait_until(true: threading.Event) -> None:
    assert true.wait(10)


@pytest.mark.parametrize("start", [0, 24, 10**9])
def test_any_number_of_replicas_and_micro_batches_reads_the_same_samples(start: int) -> None:
    batch, steps = 24, 5
    expected = [SAMPLES.batch(np.arange(start + t * batch, start + (t + 1) * batch)) for t in range(steps)]
    for replicas in (1, 2, 4):
        for micro_batch in (1, 2, 3, 6):
            shares = [ReplicaShare(batch=batch, replica=r, replicas=replicas, micro_batch=micro_batch) for r in range(replicas)]
            seen: list[list[list[Batch]]] = []
            for share in shares:
                with closing(loader(share, start=start)) as steps_of_one:
                    seen.append(list(islice(steps_of_one, steps)))
            for t in range(steps):
                parts = [micro for replica in seen for micro in replica[t]]
                assert all(len(part.tokens) == micro_batch for part in parts)
                for field in ("tokens", "targets", "positions", "documents", "samples"):
                    together = np.concatenate([getattr(part, field) for part in parts])
                    assert np.array_equal(together, getattr(expected[t], field))


def test_loader_started_halfway_continues_where_another_stopped() -> None:
    with closing(loader()) as one:
        before = [step[0].samples[0] for step in islice(one, 10)]
        position = one.position
    assert position == 40
    with closing(loader(start=position)) as two, closing(loader()) as whole:
        after = [step[0].samples[0] for step in islice(two, 10)]
        assert before + after == [step[0].samples[0] for step in islice(whole, 20)]


def test_loader_prefetches_the_requested_number_of_steps() -> None:
    made: list[int] = []
    third = threading.Event()
    too_many = threading.Event()

    def prepare(batch: Batch) -> int:
        made.append(int(batch.samples[0]))
        if len(made) == 3:
            third.set()
        if len(made) == 5:
            too_many.set()
        return made[-1]

    share = ReplicaShare(batch=2, replica=0, replicas=1, micro_batch=2)
    with closing(Loader(SAMPLES, share, start=0, prefetch=3, prepare=prepare)) as steps:
        wait_until(third)
        assert next(steps) == [0]
        assert not too_many.wait(0.1)
        assert made == [0, 2, 4, 6]


def test_loader_prepares_batches_in_its_thread() -> None:
    with closing(Loader(SAMPLES, ALONE, start=0, prefetch=1, prepare=lambda batch: threading.current_thread())) as steps:
        (thread, other) = next(steps)
        assert thread is other
        assert thread is not threading.current_thread()


def test_loader_error_reaches_the_consumer_at_its_step() -> None:
    def breaks_at_eight(batch: Batch) -> int:
        if batch.samples[0] == 8:
            raise FloatingPointError("broken")
        return int(batch.samples[0])

    steps = Loader(SAMPLES, ALONE, start=0, prefetch=4, prepare=breaks_at_eight)
    assert list(islice(steps, 2)) == [[0, 2], [4, 6]]
    with pytest.raises(FloatingPointError, match="broken") as caught:
        next(steps)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "breaks_at_eight"
    assert threads() == 0
    with pytest.raises(RuntimeError, match="closed"):  # and not the step after the broken one
        next(steps)


def test_loader_close_ends_a_working_or_waiting_thread() -> None:
    working, made = threading.Event(), []

    def slow(batch: Batch) -> None:
        working.set()
        made.append(batch)
        time.sleep(0.05)

    share = ReplicaShare(batch=2, replica=0, replicas=1, micro_batch=2)
    busy = Loader(SAMPLES, share, start=0, prefetch=1000, prepare=slow)
    wait_until(working)
    busy.close()
    assert len(made) < 100, "the thread stops long before its 1000 requests"

    full = loader(prefetch=1)
    next(full)
    time.sleep(0.05)  # by now everything asked for is there
    full.close()
    full.close()
    assert threads() == 0


def test_loader_close_wakes_a_waiting_consumer() -> None:
    release, waiting = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def consume() -> None:
        next(steps)
        waiting.set()
        try:
            while True:
                next(steps)
        except RuntimeError as error:
            raised.append(error)

    def prepare(batch: Batch) -> None:
        if batch.samples[0] >= 4:
            release.wait(10)

    steps = Loader(SAMPLES, ALONE, start=0, prefetch=1, prepare=prepare)
    consumer = threading.Thread(target=consume)
    consumer.start()
    wait_until(waiting)
    threading.Timer(0.05, release.set).start()
    steps.close()
    consumer.join(10)
    assert not consumer.is_alive()
    assert len(raised) == 1


def test_collected_loader_stops_its_thread() -> None:
    steps = loader()
    next(steps)
    (thread,) = (one for one in set(threading.enumerate()) - BEFORE if one.name.startswith("loader"))
    gone = weakref.ref(steps)
    del steps
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()


def test_uneven_replica_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="replica 2 is not one of 2"):
        ReplicaShare(batch=4, replica=2, replicas=2, micro_batch=1)
    for batch, micro_batch in [(5, 1), (4, 4), (6, 2), (0, 1), (4, 0)]:
        with pytest.raises(ValueError, match="cannot be cut"):
            ReplicaShare(batch=batch, replica=0, replicas=2, micro_batch=micro_batch)
