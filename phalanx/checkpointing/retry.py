"""Operations over a network, tried again with growing pauses until they succeed or are given up. Used by `remote` and `multipart`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from phalanx.spec.errors import PhalanxError, RunFailed

PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0)
"""Seconds before each further try."""
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidRegionError")

T = TypeVar("T")


class Unreachable(RunFailed, OSError):
    """A place that does not answer, or refuses. What lies there may be whole: it must not be taken for damaged."""

    def __init__(self, message: str):
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[Unreachable], tuple[str]]:
        return Unreachable, (str(self),)


def persist(what: str, action: Callable[[], T], pauses: tuple[float, ...] | None = None) -> T:
    """Do it, again where it fails for a reason that may pass. FileNotFoundError where nothing is there; else Unreachable."""
    for pause in (*(PAUSES if pauses is None else pauses), None):
        try:
            return action()
        except (FileNotFoundError, PhalanxError):
            raise
        except Exception as error:  # of libraries that share no class: botocore, aiohttp, those of other stores
            if pause is None or not _may_pass(error):
                raise Unreachable(f"{what}: {said(error)}") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, (*_FINAL, NotImplementedError, TypeError)) and type(error).__name__ not in _HOPELESS


def said(error: BaseException) -> str:
    """In words, on one line."""
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    return " ".join(text.split()).removesuffix(".")
