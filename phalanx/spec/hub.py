"""Names of the Hugging Face hub, such as "Qwen/Qwen3-0.6B" or "gpt2@main": the commit that a name means, and its files in the cache of
`huggingface_hub`. The loader pins names to commits before anything is started; everything else reads the files of the pinned commit.

A pinned name is "NAME@REVISION@COMMIT", or "NAME@COMMIT" if the user gave the commit. Files and folders of this machine take precedence.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.spec import safetensors_index
from phalanx.spec.errors import RunError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[^@\s]+")
_MAX_NAME = 96  # the hub's own limit
_PATHS = (".json", ".toml", ".safetensors", ".bin", ".jsonl", ".parquet", ".git", ".txt")
"""Endings of files: no repository is meant."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)


class RepositoryKind(NamedTuple):
    """What a key of the run file expects of a repository."""

    type: str
    """As the hub calls it: model or dataset."""
    files: tuple[str, ...]
    """Small files that loading a run reads."""
    required: str | None
    """The one of them that must exist."""


MODEL = RepositoryKind("model", ("config.json", "generation_config.json", *_TOKENIZER_FILES), "config.json")
TOKENIZER = RepositoryKind("model", _TOKENIZER_FILES, "tokenizer.json")
DATASET = RepositoryKind("dataset", ("README.md",), None)  # `datasets` reads the other files itself


class HubName(NamedTuple):
    """A repository of the hub at a revision."""

    repository: str
    revision: str
    """Branch, tag or commit that the user asked for."""
    commit: str | None
    """The commit that it means; None: not pinned."""

    def __str__(self) -> str:
        asked = "" if self.revision == self.commit else f"@{self.revision}"
        return self.repository + asked + (f"@{self.commit}" if self.commit else "")


class HubError(RunError):
    """Why the files of a repository cannot be had."""

    def __init__(self, sentence: str, *, exists: bool = False, unreachable: bool = False):
        super().__init__(sentence)
        self.exists = exists
        """The hub has the repository, so that the user cannot have meant a path."""
        self.unreachable = unreachable
        """The hub did not answer, and the cache does not have the files."""


def parse(text: str) -> HubName | None:
    """The hub name that a text is, whether or not such a repository exists; None: it can only be a path or a URL."""
    repository, *revisions = text.split("@")
    if not _REPOSITORY.fullmatch(repository) or len(repository) > _MAX_NAME or repository.endswith((".", "-", *_PATHS)):
        return None
    if "--" in repository or ".." in repository or not all(map(_REVISION.fullmatch, revisions)):
        return None
    match revisions:
        case []:
            return HubName(repository, "main", None)
        case [revision]:
            return HubName(repository, revision, revision if _COMMIT.fullmatch(revision) else None)
        case [revision, commit] if _COMMIT.fullmatch(commit):
            return HubName(repository, revision, commit)
    return None


def remote_name(text: str) -> HubName | None:
    """The hub name that a text is; None if a file or folder of that name exists here, or if it can only be a path."""
    name = parse(text)
    return None if name is None or os.path.exists(text) else name


def local_path(text: str) -> Path:
    """Where the files of a path or of a pinned hub name are on this machine. They need not exist."""
    name = remote_name(text)
    folder = None if name is None else _cached(name, "model")
    if folder is not None:
        return folder
    try:
        return Path(text).expanduser()
    except RuntimeError:  # the home directory of a user who does not exist
        return Path(text)


def pin(text: str, kind: RepositoryKind) -> str:
    """The name with its commit, whose small files are in the cache then; a text that is no hub name stays as it is.

    Without a network, the cache answers. Raises HubError if it cannot.
    """
    name = remote_name(text)
    if name is None or (name.commit and kind is DATASET):
        return text if name is None else str(name)
    folder = _download(name, kind.type, kind.files)
    name = name._replace(commit=folder.name)
    if kind.required is not None and not (folder / kind.required).is_file():
        raise HubError(_lacks(name, kind.required), exists=True)
    return str(name)


def ensure(text: str, kind: RepositoryKind) -> str:
    """`pin` for a name that a loaded run holds: on the machine that has pinned it, the files are in the cache, and no network is needed."""
    name = remote_name(text)
    cached = None if name is None else _cached(name, kind.type)
    return text if cached is not None and kind.required and (cached / kind.required).is_file() else pin(text, kind)


def model_folder(text: str) -> Path:
    """The folder of a model with all its weights, downloaded if needed; a text that is no hub name stays as it is."""
    text = ensure(text, MODEL)
    name = remote_name(text)
    if name is None:
        return local_path(text)
    index, single = safetensors_index.INDEX, safetensors_index.SINGLE
    folder = _cached(name, "model")
    assert folder is not None, "pinning has downloaded its config.json"
    if not (folder / index).is_file() and not (folder / single).is_file():
        folder = _download(name, "model", (index, single), shown=True)
    if (folder / index).is_file():
        shards = safetensors_index.files(folder)
        if not all((folder / shard).is_file() for shard in shards):
            _download(name, "model", shards, shown=True)
    elif not (folder / single).is_file():
        raise HubError(_lacks(name, f"{single} or {index}") + " Weights in other formats are not read.", exists=True)
    return folder


def missing_message(text: str) -> str | None:
    """Why this host does not have the files of a pinned hub name; None if the text is none."""
    name = remote_name(text)
    if name is None or name.commit is None or _cached(name, "model") is not None:
        return None
    return (
        f"its files are not in the Hugging Face cache of this host ({_constants().HF_HUB_CACHE}): run `{_command(name, 'model')}` here, or "
        "set HF_HOME to a folder that all hosts see."
    )


def _cached(name: HubName, type_: str) -> Path | None:
    """The folder of the cache with the files of a pinned name; None if there is none."""
    if name.commit is None:
        return None
    try:
        cache = _constants().HF_HUB_CACHE
    except HubError:
        return None
    folder = Path(cache) / f"{type_}s--{name.repository.replace('/', '--')}" / "snapshots" / name.commit
    return folder if folder.is_dir() else None


def _constants() -> Any:
    return library("a name of the Hugging Face hub").constants


def library(what: str) -> Any:
    """`huggingface_hub`; raises HubError with the way to install it. `what` needs it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise HubError(f"{what} needs the package huggingface_hub: pip install 'phalanx[hub]'.") from None
    return huggingface_hub


def _download(name: HubName, type_: str, files: Sequence[str], *, shown: bool = False) -> Path:
    """Downloads files of a repository, those that exist, and returns the folder of the commit. `shown`: with progress bars in a
    terminal."""
    hub = library(f'"{name.repository}", as a name of the Hugging Face hub,')
    try:
        with _progress_bars(shown and sys.stderr.isatty()):
            revision = name.commit or name.revision
            folder: str = hub.snapshot_download(name.repository, repo_type=type_, revision=revision, allow_patterns=list(files))
    except Exception as error:  # versions of the library raise different errors, and pass those of HTTP libraries on
        raise explain(error, name, type_) from None
    return Path(folder)


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def explain(error: Exception, name: HubName, type_: str) -> HubError:
    """What an error of `huggingface_hub` means, and what to do about it."""
    hub = library("a name of the Hugging Face hub")
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    page = f"{endpoint}/{'datasets/' if type_ == 'dataset' else ''}{name.repository}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__  # the hub has answered; that the cache does not have the files either says less
    status = getattr(getattr(error, "response", None), "status_code", None)
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{page} is gated: accept its terms there, and {log_in} to a token of that account.", exists=True)
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"Nor is it a {type_} of the Hugging Face hub that this machine may read ({page}): check the spelling; if it is private, "
            f"{log_in}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f'{page} has no branch, tag or commit "{name.revision}": see {page}/tree/main for those it has.', exists=True
        )
    if isinstance(error, errors.HFValidationError):
        return HubError(f"Nor is it a name that the Hugging Face hub accepts ({_line(error)}).")
    if status == 401:
        return HubError(f"{endpoint} does not accept the token of this machine (401): {log_in} to a valid one.", exists=True)
    if status == 403:
        return HubError(
            f"{page} is closed to the token of this machine (403): ask its owner, or {log_in} to a token that may read it.",
            exists=True,
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) or (status or 0) >= 500:
        return HubError(_unreachable(name, type_, error), unreachable=True)
    if (
        isinstance(error, OSError) and error.errno is not None and error.strerror
    ):  # of the disk, such as "No space left on device"
        return HubError(
            f"{page} cannot be stored in the cache {hub.constants.HF_HUB_CACHE} ({error.strerror}): set HF_HOME to another folder.",
            exists=True,
        )
    return HubError(
        f"the download of {page} was interrupted ({type(error).__name__}: {_line(error)}): run the same command again; "
        "files that are complete are not downloaded again.",
        exists=True,
    )


def _unreachable(name: HubName, type_: str, error: Exception) -> str:
    constants = _constants()
    cause = error.__cause__ or error.__context__ or error
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached ({_line(cause)})"
    return (
        f"As a name of the Hugging Face hub, its files are not in the cache {constants.HF_HUB_CACHE}, and {why}: on a machine with a "
        f"network, run `{_command(name, type_)} --local-dir FOLDER`, copy FOLDER here, and name it instead; or run "
        f"`{_command(name, type_)}` into this cache."
    )


def _command(name: HubName, type_: str) -> str:
    revision = name.commit or name.revision
    kind = "" if type_ == "model" else f" --repo-type {type_}"
    return f"hf download {name.repository}{kind}{'' if revision == 'main' else f' --revision {revision}'}"


def _lacks(name: HubName, file: str) -> str:
    where = f"{_constants().ENDPOINT}/{name.repository}/tree/{name.commit or name.revision}"
    return f"{where} has no {file}: name a repository that has it."


def _line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
