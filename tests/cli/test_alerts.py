"""Alerts and metrics of real runs, and what happens to a run whose sinks do not work."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from alert_receiver import receiving, until
from commands import InProcess, Workshop, cmdline, losses, signal_to
from openmetrics import samples
from watch_runs import Client

from phalanx.events.records import Warned
from phalanx.spec.load import load

SECRET = "hook/T000/B000/not-for-anybody"
QUIET = "watch.alerts.disk_gib=0"  # the disk of a test machine may be full


def holds_secret(folder: Path) -> list[str]:
    """Files below a folder that show the secret."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@contextmanager
def silent_server() -> Iterator[int]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def tensorboard_steps(folder: Path) -> set[int]:
    """Steps whose loss is in the files of TensorBoard."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return {
        event.step
        for file in (folder / "tensorboard").iterdir()
        for event in EventFileLoader(str(file)).Load()
        if any(value.tag == "train/loss" for value in event.summary.value)
    }


def test_a_failure_and_its_recovery_and_the_end_reach_the_webhook(workshop: Workshop) -> None:
    with receiving() as receiver:
        url = f"{receiver.url}/{SECRET}"
        ended = workshop.train(
            "watch.alerts.url=env:HOOK", 'watch.alerts.on=["failure","recovered","finished","stopped","failed"]', QUIET, "layout.data=2",
            "cluster.cpu_ranks=2", "--chaos", "kill rank=1 step=5", "--run-dir", "run", env={"HOOK": url},
        )  # fmt: skip
        assert receiver.kinds == ["failure", "recovered", "finished"] and set(receiver.paths) == {f"/{SECRET}"}
        failure, recovered, finished = receiver.alerts
        assert "rank 1" in failure["sentence"] and failure["run"] == finished["run"] == "run" and finished["step"] == 8
        assert "restart" in recovered["sentence"]
    assert ended.json["finished"] and not holds_secret(workshop.path)
    assert load(workshop.path / "run" / "run.toml").watch.alerts.url == "env:HOOK"


def test_a_written_out_address_is_in_no_file_and_no_output(workshop: Workshop) -> None:
    with receiving() as receiver:
        run_file = workshop.run_file
        address = f'[watch.alerts]\nurl = "{receiver.url}/{SECRET}"\ndisk_gib = 0\non = ["finished"]\n'
        run_file.write_text(f"{run_file.read_text()}\n{address}")
        shown = workshop.run("train", run_file.name, "--dry-run", "--json").shown
        ended = workshop.train("--run-dir", "run")
        assert receiver.kinds == ["finished"]
    assert holds_secret(workshop.path) == [str(run_file)]
    assert (
        SECRET not in shown + ended.shown and "url is set; it is a secret" in (workshop.path / "run" / "run.toml").read_text()
    )


@pytest.mark.slow
def test_a_stopped_run_says_so(workshop: Workshop) -> None:
    with receiving() as receiver:
        command = workshop.start(
            "train", "tiny.toml", "train.steps=5000", f"watch.alerts.url={receiver.url}", QUIET, "--run-dir", "run"
        )
        command.until(workshop.reached("run", 2), "step 2")
        command.process.terminate()
        assert command.wait().code == 75
        assert receiver.kinds[-1] == "stopped" and "SIGTERM" in receiver.alerts[-1]["sentence"]


def test_a_killed_launcher_is_reported_by_what_outlives_it(workshop: Workshop) -> None:
    with receiving() as receiver:
        command = workshop.start(
            "train", "tiny.toml", "train.steps=5000", f"watch.alerts.url={receiver.url}", QUIET, "--run-dir", "run"
        )
        command.until(workshop.reached("run", 2), "step 2")
        command.process.kill()
        assert command.wait().code == -signal.SIGKILL
        until(lambda: "failed" in receiver.kinds, "the alert")
        assert "has ended without saying how" in receiver.alerts[-1]["sentence"] and workshop.gone()


def test_sinks_that_do_not_work_leave_the_run_alone(workshop: Workshop) -> None:
    """Nobody listens at the webhook."""
    plain = workshop.train("--run-dir", "plain")
    url = f"http://127.0.0.1:{free_port()}/{SECRET}"
    ended = workshop.train(f"watch.alerts.url={url}", QUIET, "watch.tensorboard=true", "--run-dir", "run")
    assert losses(workshop.events("run")) == losses(workshop.events("plain")) and ended.json["loss"] == plain.json["loss"]
    warned = [
        event.message for event in workshop.events("run") if isinstance(event, Warned) and "watch.alerts.url" in event.message
    ]
    assert len(warned) == 1 and "127.0.0.1: Connection refused" in warned[0] and "the run goes on" in warned[0]
    assert "warning: watch.alerts.url does not take alerts" in ended.shown
    assert list((workshop.path / "run" / "tensorboard").iterdir()) and SECRET not in ended.shown
    assert not holds_secret(workshop.path / "run")


@pytest.mark.slow
def test_a_webhook_that_never_answers_does_not_keep_the_command(workshop: Workshop) -> None:
    with silent_server() as port:
        ended = workshop.train(f"watch.alerts.url=http://127.0.0.1:{port}", QUIET, "--run-dir", "run")
        assert ended.json["finished"] and ended.shown.count("warning: watch.alerts.url") == 1
    assert workshop.gone()


@pytest.mark.slow
def test_a_sink_process_that_is_killed_is_started_again_and_repeats_little(workshop: Workshop) -> None:
    command = workshop.start(
        "train", "tiny.toml", "train.steps=120", "watch.tensorboard=true", "checkpoint.every=120", "--run-dir", "run"
    )
    command.until(lambda: list((workshop.path / "run").glob("tensorboard/*")), "a file of TensorBoard")
    (process,) = [each for each in workshop.processes() if "phalanx.watch.run_sinks" in cmdline(each)]
    signal_to(process, signal.SIGKILL)
    assert command.wait().code == 0
    assert tensorboard_steps(workshop.path / "run") == set(range(1, 121)), "no step is missing"


def test_metrics_are_served_with_the_run(workshop: Workshop) -> None:
    port = free_port()
    command = workshop.start(
        "train", "tiny.toml", "train.steps=5000", f"watch.metrics_port={port}", "watch.metrics_token=env:TOKEN", "--run-dir", "run",
        env={"TOKEN": "0123456789abcdef-token"},
    )  # fmt: skip
    command.until(workshop.reached("run", 4), "step 4")
    assert f"metrics http://127.0.0.1:{port}/metrics" in command.output().shown
    client = Client(port)

    def scrape() -> dict[str, float]:
        answer = client.get("/metrics", Authorization="Bearer 0123456789abcdef-token")
        assert answer.status == 200, answer
        return {name: value for (name, _), value in samples(answer.body.decode()).items()}

    first = scrape()
    assert first["phalanx_step"] >= 4 and first["phalanx_tokens_processed_total"] == first["phalanx_tokens_trained"]
    command.until(lambda: scrape()["phalanx_step"] > first["phalanx_step"], "a later step")
    assert client.get("/metrics").status == 401 and client.get("/", Authorization="Bearer 0123456789abcdef-token").status == 404
    command.process.terminate()
    assert command.wait().code == 75
    with pytest.raises(OSError):
        client.get("/metrics")
    assert b"0123456789abcdef-token" not in b"".join(
        path.read_bytes() for path in (workshop.path / "run").rglob("*") if path.is_file()
    )


# --- the command ----------------------------------------------------------------------------------------------------


def write(folder: Path, watch: str) -> Path:
    file = folder / "run.toml"
    file.write_text(f"[train]\nbatch = 8\nsteps = 4\n\n{watch}")
    return file


def test_a_test_message_is_sent(here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", f"{receiver.url}/{SECRET}")
        file = write(tmp_path, '[watch.alerts]\nurl = "env:HOOK"\non = ["failed", "disk"]\n')
        ended = here("alerts", "test", file, "--json")
        assert ended.code == 0 and ended.json == {"sent": True, "alerts": ["failed", "disk"]}
        assert "This is a test message." in receiver.alerts[0]["sentence"]
        receiver.answers = [404]
        refused = here("alerts", "test", file)
        assert refused.code == 1 and "127.0.0.1 answers 404 Not Found" in refused.shown and SECRET not in refused.shown
    monkeypatch.delenv("HOOK")
    unset = here("alerts", "test", file)
    assert unset.code == 2 and 'watch.alerts.url = "env:HOOK": the environment has no such variable' in unset.shown
    missing = here("alerts", "test", write(tmp_path, ""))
    assert missing.code == 2 and "watch.alerts.url is not set" in missing.shown


@pytest.mark.parametrize(
    "settings, words",
    [
        ((f"watch.alerts.url=ftp://{SECRET}",), "watch.alerts.url is neither an address"),
        ((f"watch.alerts.url=hooks/{SECRET}",), "watch.alerts.url is neither an address"),
        ((f'watch.alerts.url=["https://{SECRET}"]',), "watch.alerts.url is a list, but a string is expected"),
        ((f'watch.alerts.url="https://{SECRET}',), "not whole TOML"),
        (("watch.otlp=http://user:not-for-anybody@host:4318",), "watch.otlp holds a password"),
        (("watch.otlp=localhost",), 'watch.otlp = "localhost" is no address'),
        (("watch.mlflow=true", "watch.mlflow_uri=http://me:pw@host"), "MLFLOW_TRACKING_USERNAME"),
        (("watch.mlflow_uri=http://host:5000",), "not used without watch.mlflow = true"),
        (("watch.metrics_port=70000",), "between 1 and 65535"),
        (("watch.metrics_port=9464", "watch.metrics_host=0.0.0.0"), "a token is needed: set watch.metrics_token"),
        (("watch.metrics_port=9464", "watch.metrics_token=short"), "at least 16 printable characters"),
        (('watch.alerts.on=["slwo"]',), 'did you mean "slow"?'),
        (("watch.alerts.slow_below=2",), "between 0.0 and 1.0"),
        (("watch.alerts.url=env:NOBODY_HAS_SET_THIS",), "the environment has no such variable"),
        (("watch.otlp=http://localhost:4318",), "pip install 'phalanx[otel]', or remove watch.otlp"),
        (("watch.mlflow=true",), "pip install 'phalanx[mlflow]', or set watch.mlflow = false"),
        ((f"watch.alerts.url=https://{SECRET}", "--on", "slurm"), 'passes the run on in a file: set it to "env:NAME"'),
        ((f"watch.alerts.url=https://{SECRET}", "--sweep", "train.seed=1,2"), 'passes the run on in a file: set it to "env:NAME"'),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_before_anything_starts(
    here: InProcess, workshop: Workshop, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], words: str
) -> None:
    if "phalanx[" in words:
        import importlib.util

        package = "mlflow" if "mlflow" in words else "opentelemetry"
        if importlib.util.find_spec(package) is not None:
            pytest.skip(f"{package} is installed")
    monkeypatch.chdir(workshop.path)
    refused = here("train", "tiny.toml", *settings)
    assert refused.code == 2 and words in " ".join(refused.shown.split()), refused
    assert "not-for-anybody" not in refused.shown and not (workshop.path / "runs").exists()


def test_a_port_that_is_taken_is_refused(here: InProcess, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = here("train", "tiny.toml", f"watch.metrics_port={port}")
    assert refused.code == 2 and f"watch.metrics_port = {port}: 127.0.0.1 cannot listen there" in refused.shown
    assert "name another port" in " ".join(refused.shown.split())


# --- other launchers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sinks_of_a_run_under_torchrun(workshop: Workshop) -> None:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "-m", "phalanx"]
    with receiving() as receiver:
        url = f"watch.alerts.url={receiver.url}"
        ended = workshop.run("train", "tiny.toml", url, QUIET, "watch.tensorboard=true", "--run-dir", "run", program=torchrun)
        assert ended.code == 0 and receiver.kinds[-1] == "finished" and "failed" not in receiver.kinds, ended
    assert tensorboard_steps(workshop.path / "run") == set(range(1, 9))


@pytest.mark.slow
def test_sinks_move_to_the_host_of_the_next_controller(workshop: Workshop) -> None:
    """As under Slurm: one process for each host, and none of them outlives its host. The host of the controller is lost."""
    with receiving() as receiver:
        hosts = [
            workshop.start(
                "node", "run", "--node", number, "--nodes", 3, "--launch", "one", "--run-file", "tiny.toml", "train.steps=150", "layout.data=2",
                "cluster.nodes=3", "resilience.spares=1", "watch.alerts.url=env:HOOK", QUIET, "watch.tensorboard=true", 'watch.alerts.on=["failure","recovered","finished","failed"]',
                env={"HOOK": receiver.url},
            )
            for number in range(3)
        ]  # fmt: skip
        hosts[0].until(workshop.reached("run", 20), "step 20")
        first = [each for each in workshop.processes() if "phalanx.watch.run_sinks" in cmdline(each)]
        (leader,) = {host.pid for host in hosts} & {parent.pid for each in first for parent in each.parents()}
        lost = psutil.Process(leader)
        for process in [*lost.children(recursive=True), lost]:
            signal_to(process, signal.SIGKILL)
        for host in hosts:
            assert host.wait().code == (-signal.SIGKILL if host.pid == leader else 0)
        assert sorted(set(receiver.kinds)) == ["failure", "finished", "recovered"] and receiver.kinds.count("finished") == 1
    assert len(first) == 1 and tensorboard_steps(workshop.path / "run") == set(range(1, 151))
