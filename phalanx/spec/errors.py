"""What a person is told when a run cannot start. Raised everywhere below the CLI, printed only by the CLI."""

from __future__ import annotations

from collections.abc import Sequence


class PhalanxError(Exception):
    """A problem the person can fix. The CLI prints it without a traceback and exits with `exit_code`."""

    exit_code = 2


class RunError(PhalanxError):
    """Everything that is wrong with a run, found before any process starts."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[RunError], tuple[tuple[str, ...]]]:
        """So that it survives the way from one process to another."""
        return RunError, (self.problems,)


class RunFailed(PhalanxError):
    """A run that started and could not go on: a worker crashed, or too many steps had to be skipped."""

    exit_code = 1
