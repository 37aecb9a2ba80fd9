"""Uploads an exported model to a repository of the Hugging Face hub, for `phalanx export --push`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.hub import library, parse

T = TypeVar("T")
_STALE = ["model*.safetensors", "model.safetensors.index.json"]
"""Weights of an earlier push, which may have other shards: those that are not written again are removed in the same commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The result of an upload."""

    repository: str
    branch: str
    commit: str
    url: str


class PushTarget:
    """A branch of a repository that may not exist yet."""

    def __init__(self, repository: str, *, branch: str | None = None, private: bool = False):
        """Checks the name, and that there is a valid token, before anything is exported. Raises RunError."""
        name = parse(repository)
        if name is None or "@" in repository:
            raise RunError(
                f'--push {repository}: name a repository as "organization/name" or "name"; --revision names a branch.'
            )
        self._hub = library("--push")
        self._repository, self._branch, self._private = repository, branch, private
        self._api: Any = self._hub.HfApi()
        user: dict[str, Any] = self._try(self._api.whoami, RunError)
        if "/" not in repository:
            self._repository = f"{user['name']}/{repository}"

    def push(self, folder: Path, message: str) -> Pushed:
        """Create the repository and the branch if needed, and make the folder's files one commit. Raises RunFailed."""
        name, branch = self._repository, self._branch or "main"

        def upload() -> Pushed:
            self._api.create_repo(name, private=self._private or None, exist_ok=True)
            if branch != "main":
                self._api.create_branch(name, branch=branch, exist_ok=True)
            commit = self._api.upload_folder(
                repo_id=name, folder_path=folder, revision=branch, commit_message=message, delete_patterns=_STALE
            )
            url = f"{self._api.endpoint}/{name}" + (f"/tree/{branch}" if branch != "main" else "")
            return Pushed(repository=name, branch=branch, commit=commit.oid, url=url)

        return self._try(upload, RunFailed)

    def _try(self, action: Callable[[], T], failure: type[RunError | RunFailed]) -> T:
        """The action's result; its errors are worded for people."""
        try:
            return action()
        except Exception as error:  # versions of the library raise different errors, and pass those of HTTP libraries on
            raise failure(f"--push {self._repository}: {self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        errors, endpoint = self._hub.errors, self._hub.constants.ENDPOINT
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set: unset it, or export to a folder and run `hf upload` where there is a network."
        if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
            return f"{endpoint} does not accept the token of this machine: log in with `hf auth login`, or set HF_TOKEN to one that may write."
        if status == 403:
            return (
                f"the token of this machine may not write there (403): use a token with write access, or another name ({said})."
            )
        if status is not None:
            return f"{endpoint} answered {status} ({said})."
        return (
            f"{endpoint} cannot be reached ({type(error).__name__}: {said}): run the command again, or export to a folder only."
        )
