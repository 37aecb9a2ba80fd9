"""`phalanx watch` as a person starts it, and the page that a run brings along."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest
from commands import InProcess, Started, Workshop
from object_store import ACCESS, Store, serve
from watch_runs import Client, started, step, write_run


def announced(command: Started) -> dict[str, object]:
    """The JSON line of a server that has started."""
    command.until(lambda: command.output().out.endswith("\n"), "its address")
    line: dict[str, object] = json.loads(command.output().out)
    return line


def test_a_folder_is_served_until_ctrl_c(workshop: Workshop) -> None:
    write_run(workshop.path / "runs" / "a", [started(), step(1)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = workshop.start("watch", "runs", "--port", port, "--json")
        where = announced(command)
        assert int(str(where["port"])) > port and f"port {port} is taken" in command.output().err
        client = Client(int(str(where["port"])))
        assert client.get("/api/runs").json["runs"][0]["name"] == "a" and where["token"] is None
        assert b"page.js" in client.get("/").body
    command.process.send_signal(signal.SIGINT)
    assert command.wait().code == 0


@pytest.mark.parametrize("options", [("--host", "0.0.0.0"), ("--token",)])
def test_others_need_the_token_that_is_printed(workshop: Workshop, options: tuple[str, ...]) -> None:
    write_run(workshop.path / "a", [started(), step(1)])
    command = workshop.start("watch", "a", "--port", 0, "--json", *options)
    where = announced(command)
    client, token = Client(int(str(where["port"]))), str(where["token"])
    assert len(token) >= 32 and f"?token={token}" in command.output().err
    assert client.get("/api/runs").status == 401
    assert client.get("/api/runs", Authorization=f"Bearer {token}").json["runs"][0]["step"] == 1
    command.process.terminate()
    assert command.wait().code == 0


def test_what_cannot_be_served_is_refused(here: InProcess, tmp_path: Path) -> None:
    missing = here("watch", "nowhere")
    assert missing.code == 2 and "nowhere is not a folder: name a run directory" in missing.shown
    elsewhere = here("watch", tmp_path, "--host", "203.0.113.7")
    assert elsewhere.code == 2 and "--host 203.0.113.7: cannot listen there" in elsewhere.shown


def test_a_run_brings_its_page_along(workshop: Workshop) -> None:
    command = workshop.start("train", workshop.run_file.name, "watch.page=true", "train.steps=2000")
    command.until(workshop.reached("runs/tiny", 3), "step 3")
    shown = command.output().shown
    found = re.search(r"page http://127\.0\.0\.1:(\d+)/", shown)
    assert found is not None, shown
    client = Client(int(found[1]))
    header = client.view("tiny", "overview")["header"]
    assert header["state"] == "running" and header["step"] >= 3 and header["steps"] == 2000
    command.process.send_signal(signal.SIGTERM)
    assert command.wait().code == 75
    with pytest.raises(OSError):
        client.get("/api/runs")


def test_the_page_ends_with_a_launcher_that_is_killed(workshop: Workshop) -> None:
    command = workshop.start("train", workshop.run_file.name, "watch.page=true", "train.steps=100000")
    command.until(workshop.reached("runs/tiny", 1), "step 1")
    command.process.kill()
    assert command.wait().code == -signal.SIGKILL
    assert workshop.gone(), "the page outlived the launcher"


def test_a_sweep_has_one_page_of_all_its_runs(workshop: Workshop) -> None:
    command = workshop.start(
        "train", workshop.run_file.name, "--sweep", "train.seed=1,2", "watch.page=true", "train.steps=2000"
    )
    command.until(workshop.reached("runs/tiny-sweep/seed=1", 3), "step 3 of the first run")
    shown = command.output().shown
    (port,) = re.findall(r"page http://127\.0\.0\.1:(\d+)/", shown)
    client = Client(int(port))
    (run,) = client.get("/api/runs").json["runs"]
    assert run["name"] == "seed=1" and run["steps"] == 2000
    assert client.view("seed=1", "overview")["header"]["state"] == "running"
    command.process.send_signal(signal.SIGTERM)
    assert command.wait().code == 75
    with pytest.raises(OSError):
        client.get("/api/runs")


def test_a_run_in_an_object_store_is_served(workshop: Workshop) -> None:
    write_run(workshop.path / "a", [started(), step(1)])
    with serve() as store:
        bucket = store.bucket()
        for name in ("run.toml", "events.jsonl"):
            if (workshop.path / "a" / name).exists():
                put(store, bucket, f"runs/a/{name}", (workshop.path / "a" / name).read_bytes())
        command = workshop.start("watch", f"s3://{bucket}/runs", "--port", 0, "--json", env=store.env())
        client = Client(int(str(announced(command)["port"])))
        command.until(lambda: client.get("/api/runs").json["runs"][0]["step"] == 1, "the first step")
        write_run(workshop.path / "b", [started(), step(1), step(2)])
        put(store, bucket, "runs/a/events.jsonl", (workshop.path / "b" / "events.jsonl").read_bytes())
        overview = "/api/view?run=a&view=overview"
        command.until(
            lambda: client.get(overview).status == 200 and client.get("/api/runs").json["runs"][0]["step"] == 2, "step 2"
        )
        command.process.send_signal(signal.SIGINT)
        assert command.wait().code == 0


def put(store: Store, bucket: str, key: str, content: bytes) -> None:
    import boto3

    access = {"aws_access_key_id": ACCESS["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": ACCESS["AWS_SECRET_ACCESS_KEY"]}
    client = boto3.client("s3", endpoint_url=f"http://{store.address}:{store.port}", region_name="us-east-1", **access)
    client.put_object(Bucket=bucket, Key=key, Body=content)
