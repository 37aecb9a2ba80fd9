"""What a stack of Python calls says, in words: which collective somebody waits in, and what it does otherwise. Of plain values, so that
a rank can ask about its own frames (`worker/hang_report`) and a supervisor about what a dying rank has written (`recovery/diagnose`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_HOME = str(Path(__file__).resolve().parent.parent) + "/"

STORE = "store"
"""Waiting for a word that another rank leaves in the ranks' store."""


class Frame(NamedTuple):
    """One call. Stacks have the innermost last."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{own(self.file) or _short(self.file)}:{self.line} {self.function}"


# torch's function: the collective as a person calls it.
_NAMES = {
    "isend": "send",
    "irecv": "recv",
    "batch_isend_irecv": "send and recv",
    "monitored_barrier": "barrier",
}
_ENDINGS = re.compile(r"(_(into_tensor|tensor|single|object_list|object|coalesced))+$")

_PLUMBING = ("/torch/distributed/c10d_logger.py", "/contextlib.py", "/socket.py", "/ssl.py", "/torch/utils/_contextlib.py")
_OWN_PLUMBING = ("parallel/store.py", "events/frames.py", "observe/comm_timer.py")

# Files of this program by what they are for; the first that fits.
_ROOMS = (
    (("data/",), "the data loader"),
    (("training/evaluate.py", "training/fixed_prompt.py", "evaluation/"), "evaluation"),
    (("checkpointing/restore.py", "checkpointing/tools/offline_writer.py", "training/initial.py"), "restoring"),
    (
        ("checkpointing/", "training/saving.py", "training/memory_copies.py", "training/exporting.py", "training/uploading.py"),
        "saving",
    ),
    (tuple(f"training/{name}.py" for name in ("optimizer", "adamw", "muon", "outer", "offload")), "the optimizer"),
    (("training/build.py", "parallel/apply.py"), "building the model"),
)


def own(file: str) -> str | None:
    """The path inside this program; None for a file of somebody else's."""
    return file.removeprefix(_HOME) if file.startswith(_HOME) else None


def called(name: str) -> str:
    """A collective as a person calls it, by torch's name of the function."""
    plain = _ENDINGS.sub("", name.lower().removeprefix("_"))
    return _NAMES.get(plain, plain)


def waited_in(frames: Sequence[Frame]) -> tuple[str, int] | None:
    """The collective that waits, and which of the frames is its; None where the innermost calls are none of waiting for others."""
    found: tuple[str, int] | None = None
    for index in range(len(frames) - 1, -1, -1):
        frame = frames[index]
        if frame.file.endswith("/torch/distributed/distributed_c10d.py"):
            found = called(frame.function), index
        elif own(frame.file) == "parallel/store.py":
            found = STORE, index
        elif own(frame.file) == "observe/comm_timer.py" and frame.function in ("wait", "meet"):
            return found or ("collective", index)
        elif not frame.file.endswith(_PLUMBING) and own(frame.file) not in _OWN_PLUMBING:
            break
    return found


def room(frames: Sequence[Frame]) -> str | None:
    """What the innermost file of this program that has a task is for."""
    for frame in reversed(frames):
        path = own(frame.file)
        for files, words in _ROOMS:
            if path is not None and path.startswith(files):
                return words
    return None


def place(frames: Sequence[Frame], layer: str | None = None) -> str:
    """What somebody does who does not wait: "in the data loader", "in the forward of layer blocks.3", …; else the innermost call."""
    if not frames:
        return "nowhere"
    task = room(frames)
    backward = any(frame.function == "_engine_run_backward" for frame in frames)
    words = [] if task is None else [f"in {task}"]
    if task in (None, "evaluation"):
        if layer is not None:
            words.append(f"in the {'backward' if backward else 'forward'} of layer {layer}")
        elif backward:
            words.append("in the backward")
    return ", ".join(words) or f"at {frames[-1]}"


def parse(dump: str) -> list[Frame]:
    """The main thread's stack in what `faulthandler` has written: it comes last, and each thread's innermost call first."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', threads[-1], flags=re.MULTILINE)
    return [Frame(file, int(line), function) for file, line, function in reversed(lines)]


def written(frames: Sequence[Frame]) -> str:
    """Like a traceback."""
    return "".join(f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in frames)


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:]).lstrip("/")
