"""The directory of a run: paths, the lock, and files that are replaced whole. docs/run-directory.md is the contract for readers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

_LOCK_TRIES, _LOCK_SECONDS = 3, 0.02
_SIGN_OF_LIFE = 60.0  # seconds since its last sign of life after which a controller counts as gone


class RunDir:
    """Paths in a run directory."""

    def __init__(self, path: Path):
        self.path = path
        self.run_file = path / "run.toml"
        self.plan_file = path / "plan.json"
        self.events_file = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.curve = path / "loss.png"
        self.tokenizer = path / "tokenizer"
        self.control = path / "control"
        self.request_file = path / "request.toml"
        self.settings_file = self.control / "settings.json"
        self.exit_file = self.control / "exit_code"
        self.stop_file = self.control / "stop"
        self.ask_file = self.control / "ask.json"
        self.top_file = self.control / "top"
        self.beats_file = self.control / "beats.json"
        self.profiles = path / "profiles"
        self.job_file = path / "kubernetes.json"
        self._lock: int | None = None

    @property
    def exists(self) -> bool:
        """Whether a run was started here before."""
        return self.run_file.is_file()

    def create(self) -> None:
        for directory in (self.path, self.checkpoints, self.logs):
            directory.mkdir(parents=True, exist_ok=True)

    def acquire(self) -> bool:
        """Lock this directory until the process ends, however it ends; False if another process has the lock."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_LOCK_SECONDS)  # it may be somebody who only looks whether it is locked
            else:
                self._lock = fd
                return True
        os.close(fd)
        return False

    @property
    def in_use(self) -> bool:
        """Whether a process has locked this directory."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def launch_id(self) -> str | None:
        """Identifies the running launch; None if there is none."""
        with contextlib.suppress(OSError):
            return (self.control / "launch").read_text()
        return None

    @launch_id.setter
    def launch_id(self, value: str) -> None:
        self.control.mkdir(exist_ok=True)
        replace_file(self.control / "launch", value)

    @property
    def is_running(self) -> bool:
        """Whether a process trains here, as far as this machine knows. Everybody who shows, follows or stops a run asks this.

        The launch file proves nothing: a launcher that is killed leaves it behind. The lock ends with its process, however that ends.
        """
        return self.in_use or self.job_is_running or self._controller_lives

    @property
    def _controller_lives(self) -> bool:
        """Whether a run that was started on each host by itself has outlived the host with the lock: its controller touches its file."""
        if not self.settings_file.exists() or self.exit_file.exists():
            return False
        touched = [0.0]
        for path in self.control.glob("node-*"):
            with contextlib.suppress(OSError):
                touched.append(path.stat().st_mtime)
        return time.time() - max(touched) < _SIGN_OF_LIFE

    @property
    def job_is_running(self) -> bool:
        """Whether a Kubernetes job that writes its records here has not ended, as far as this machine knows: it can be followed again."""
        return self.job_file.is_file() and self.launch_id is not None and not self.exit_file.exists()

    def rank_log(self, rank: int) -> Path:
        """Output of a rank."""
        return self.logs / f"rank-{rank}.log"

    def rank_error_file(self, rank: int) -> Path:
        """Failure report that the rank writes itself."""
        return self.logs / f"rank-{rank}.error.json"


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically, so that nobody reads half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def replace_private_file(path: Path, text: str) -> None:
    """As `replace_file`, for a secret: only this user can read the file, from its creation on."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
