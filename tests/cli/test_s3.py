"""Whole runs whose checkpoints lie in an object store: killed in the middle of a save, on a wire that breaks, and told what is wrong."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from commands import FinishedRuns, StepLosses, Workshop
from object_store import Store, after, serve, wire

from phalanx.events.records import Restored, Saved, Uploaded

TWO = ("layout.data=2", "checkpoint.every=3")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with serve() as server:
        yield server


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def names(store: Store, bucket: str) -> list[str]:
    """Everything in a bucket, as the server itself tells."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{store.port}",
        aws_access_key_id="somebody",
        aws_secret_access_key="a word",
        region_name="us-east-1",
    )
    return [found["Key"] for found in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


@pytest.mark.slow
def test_s3_kill_during_a_save_resumes(workshop: Workshop, store: Store, finished: FinishedRuns, losses: StepLosses) -> None:
    straight = losses(finished(2).workshop.events("ranks-2"))
    bucket, held = store.bucket(), threading.Event()

    def hold(sent: int, data: bytes) -> bool:
        """The second rank's part of the second checkpoint never arrives."""
        if b"step-00000006/state-00001" in data.split(b"\r\n")[0] and data.startswith(b"PUT"):
            held.set()
            threading.Event().wait(60)
        return False

    url = f"checkpoint.url=s3://{bucket}/run"
    with wire(store.port, hold) as slow:
        command = workshop.start("train", "tiny.toml", *TWO, url, "--run-dir", "killed", env=store.env(slow.port))
        command.until(held.is_set, "the second save")
        command.until(
            lambda: any("step-00000006/state-00000" in name for name in names(store, bucket)), "the first rank's part"
        )
        command.process.kill()
        command.wait()
        assert workshop.gone()
    assert "run/step-00000003/commit.json" in names(store, bucket)
    assert "run/step-00000006/commit.json" not in names(store, bucket)
    # A wire that breaks now and then, in the middle of uploads too: nothing of it is seen in the run.
    with wire(store.port, after(20_000, 60_000, 200_000)) as cut:
        workshop.train(*TWO, url, "--run-dir", "killed", env=store.env(cut.port))
        assert cut.cuts == 3
    events = workshop.events("killed")
    assert [(one.step, one.path) for one in of(Restored, events)] == [(3, f"s3://{bucket}/run/step-00000003")]
    records = losses(events)
    assert {step: (loss, digest) for step, loss, digest in records} == {step: (loss, digest) for step, loss, digest in straight}
    assert all(record in straight for record in records), "a step that was taken twice came out differently"
    markers = [name for name in names(store, bucket) if name.endswith("commit.json")]
    assert markers == [f"run/step-{step:08d}/commit.json" for step in (6, 8)]


@pytest.mark.slow
def test_s3_upload_resumes_without_the_run_directory(
    workshop: Workshop, store: Store, finished: FinishedRuns, losses: StepLosses
) -> None:
    straight = losses(finished(2).workshop.events("ranks-2"))
    bucket, env = store.bucket(), store.env()
    settings = (*TWO, f"checkpoint.url=s3://{bucket}/run", "checkpoint.local_first=true", "checkpoint.keep_last=1")
    workshop.train(*settings, "train.steps=6", "--run-dir", "first", env=env)
    events = workshop.events("first")
    assert [one.path for one in of(Saved, events)][-1].endswith("first/checkpoints/step-00000006")
    assert of(Uploaded, events)[-1].url == f"s3://{bucket}/run/step-00000006"
    begun = losses(events)
    shutil.rmtree(workshop.path / "first")
    ended = workshop.train(*settings, "--run-dir", "second", env=env)
    assert "NOT" not in ended.shown
    events = workshop.events("second")
    assert [one.path for one in of(Restored, events)] == [f"s3://{bucket}/run/step-00000006"]
    assert [record[0] for record in losses(events)] == [7, 8]
    # The learning rate follows the length of the run, so the first six steps are compared by their batches alone.
    assert [digest for _, _, digest in begun + losses(events)] == [digest for _, _, digest in straight]
    assert {name.split("/")[1] for name in names(store, bucket)} == {"step-00000008"}


def test_s3_problems_are_reported_before_the_start(workshop: Workshop, store: Store) -> None:
    ended = workshop.run(
        "train", "tiny.toml", "checkpoint.url=s3://no-such-bucket-here/run", "--run-dir", "none", env=store.env()
    )
    assert ended.code == 2 and not (workshop.path / "none").exists(), ended
    assert "does not exist" in ended.err and "create the bucket first" in " ".join(ended.err.split())
