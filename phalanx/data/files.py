"""Finds and opens the files of a source: local or behind a URL, compressed or not."""

from __future__ import annotations

import contextlib
import errno
import glob
import gzip
import importlib
import io
import os
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, cast

from phalanx.spec.errors import RunError, refuse
from phalanx.spec.run import MixedSource, Source

BLOCK = 1 << 20
"""Bytes per read."""
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_SUFFIXES = {"jsonl": _JSON_LINES, "chat": _JSON_LINES, "preferences": _JSON_LINES, "parquet": (".parquet", ".pq")}
"""Suffixes of the files that are read from a folder, by kind of source. "text" reads files that look like text, others every file."""
_TEXT_NAMES = (
    ".txt .text .md .markdown .rst .tex .org .adoc .log .csv .tsv .json .jsonl .ndjson .xml .html .htm .yaml .yml .toml .ini .cfg .srt "
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .js .ts .jsx .tsx .css .rb .php .pl .lua .r .jl .hs .ml .scala .swift .sh .sql"
)
_TEXT = frozenset(_TEXT_NAMES.split())
"""Suffixes that need no look inside."""
_BINARY_NAMES = (
    ".safetensors .pt .pth .ckpt .bin .npy .npz .pkl .pickle .h5 .onnx .gguf .parquet .pq .arrow .tokens .png .jpg .jpeg .gif .webp .bmp "
    ".ico .tif .tiff .pdf .doc .docx .xls .xlsx .ppt .pptx .odt .epub .zip .tar .tgz .7z .rar .bz2 .xz .mp3 .wav .flac .ogg .mp4 .mkv .avi "
    ".mov .webm .exe .dll .so .a .o .pyc .class .jar .wasm .db .sqlite .woff .woff2 .ttf .otf"
)
_BINARY = frozenset(_BINARY_NAMES.split())
"""Suffixes of files that are no text, whatever their first bytes."""
_SNIFFED = 8192
"""Bytes of a file of any other name that must have no zero byte, which no text in UTF-8 or a code page has."""
_RUN_DIRECTORY = ("run.toml", "plan.json")
"""Files by which the directory of a run is recognized."""
_GZIP, _ZSTD = (".gz",), (".zst", ".zstd")
_ZSTD_FEED = 1 << 9
"""Compressed bytes per call of the zstd decoder: each byte may expand to thousands, and the output has to stay small."""
_INSTALLED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders below the standard library's folder that are not part of it."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    path: str
    """Absolute path, or a URL."""
    size: int | None
    """Stored bytes; None if a server does not report it."""
    stamp: str
    """Changes when the file is rewritten: modification time, or the equivalent of the storage."""


def table_key(source: Source) -> str:
    """The run file's table of this source."""
    return f"data.mix.{source.name}" if isinstance(source, MixedSource) and source.name else "data"


def paths_key(source: Source) -> str:
    """The run file's name for the paths of this source."""
    return f"{table_key(source)}.paths"


def find_files(source: Source, kind: str) -> list[SourceFile]:
    """Every non-empty file that `source.paths` names, sorted by path. Opens none; raises RunError with all problems at once."""
    return _search(source, kind).result()


def skipped_files(source: Source, kind: str) -> list[str]:
    """Files in the folders of a "text" source that are not read because they are no text."""
    return sorted(_search(source, kind).skipped) if kind == "text" and source.paths else []


def _search(source: Source, kind: str) -> _FileSearch:
    key = paths_key(source)
    if not source.paths:
        raise RunError(f'{key} names nothing, but source = "{kind}" reads files; give it at least one file, folder or glob.')
    search = _FileSearch(key, _SUFFIXES.get(kind, ()), text_only=kind == "text", run_directories=kind in ("parquet", "hf"))
    for path in source.paths:
        search.add(path)
    return search


def stdlib_files(table: str = "data") -> list[SourceFile]:
    """Python's own source files. `table`: the run file's table, for errors."""
    root = sysconfig.get_paths()["stdlib"]
    search = _FileSearch(f"{table}.source", (".py",), skip=_INSTALLED)
    search.add(root)
    files = [replace(file, stamp="") for _, file in sorted(search.files.items()) if file.size]
    if not files:
        raise RunError(
            f'{table}.source = "stdlib": there is no Python source below {root}; set {table}.source = "text" and {table}.paths.'
        )
    return files


class _FileSearch:
    """Collects files, files that cannot be read, and problems with the paths themselves."""

    def __init__(
        self,
        key: str,
        suffixes: tuple[str, ...],
        skip: frozenset[str] = frozenset(),
        *,
        text_only: bool = False,
        run_directories: bool = True,
    ):
        """`text_only`: skip files of folders that are no text; `run_directories`: accept run directories inside folders."""
        self.files: dict[str, SourceFile] = {}
        self.skipped: dict[str, None] = {}
        """Files that are no text."""
        self._text_only, self._run_directories = text_only, run_directories
        self._unreadable: dict[str, str] = {}
        self._problems: list[str] = []
        self._key, self._suffixes, self._skip = key, suffixes, skip

    def add(self, path: str) -> None:
        """Add the files of one path, folder, glob or URL."""
        if is_url(path):
            self._add_url(path)
            return
        if not path.strip():
            self._problems.append(f'{self._key} holds an empty path; write "." for the working directory.')
            return
        absolute = os.path.abspath(os.path.expanduser(path))
        # A name that exists is never a pattern, whatever brackets it contains.
        named, before = os.path.lexists(absolute), len(self.skipped)
        matches = [absolute] if named else glob.glob(absolute, recursive=True)
        if self._text_only and not named and not os.path.splitext(absolute)[1].strip(".*?"):  # such as "notes/**"
            matches = [match for match in matches if not os.path.isfile(match) or self._is_text(match)]
        skipped = list(self.skipped)[before:]
        if not matches and not skipped:
            self._problems.append(
                f'{self._key}: "{path}" matches no file or folder (tried {absolute}); '
                "correct it, or start the run in the folder it is relative to."
            )
        elif (
            not any([self._add_match(match) for match in matches]) and not self._unreadable
        ):  # a list: every match has to be added
            skipped = list(self.skipped)[before:]
            suffixes = f" named {', '.join(self._suffixes)}" if self._suffixes else " of text" if skipped else ""
            others = f"; {skipped[0]}{_and_more(len(skipped))} no text" if skipped else ""
            self._problems.append(
                f'{self._key}: "{path}" holds no files{suffixes} (looked through {absolute}){others}; put some there or remove it.'
            )

    def _add_match(self, path: str) -> bool:
        """Add a file, or all files of a folder; False if the folder has none."""
        if os.path.isdir(path):
            return self._add_folder(path)
        if not os.path.isfile(path):
            self._unreadable[path] = "neither a file nor a folder" if os.path.exists(path) else os.strerror(errno.ENOENT)
        elif not os.access(path, os.R_OK):
            self._unreadable[path] = os.strerror(errno.EACCES)
        else:
            status = os.stat(path)
            self.files[path] = SourceFile(path, status.st_size, str(status.st_mtime_ns))
        return True

    def _add_folder(self, top: str) -> bool:
        """Hidden names are skipped, as in globs, and so are links to folders, which may form a loop."""
        any_file = False
        for folder, subfolders, names in os.walk(top, onerror=self._note_unreadable):
            subfolders[:] = filter(self._is_shown, subfolders)
            if not self._run_directories and all(name in names for name in _RUN_DIRECTORY):
                self._problems.append(
                    f"{self._key}: the run directory {folder} is inside {top}, and its records and checkpoints would be read as text; "
                    "move it out of the data, or name the files to read with a glob."
                )
                subfolders.clear()
                any_file = True  # one problem is enough
                continue
            for name in filter(self._is_shown, names):
                path = os.path.join(folder, name)
                # A link without a target is text that the user expects to be there: it is reported.
                if not self._matches_suffix(name) or (os.path.exists(path) and not os.path.isfile(path)):
                    continue
                if not self._text_only or self._is_text(path):
                    any_file = self._add_match(path)
        return any_file

    def _is_text(self, path: str) -> bool:
        """Whether a file looks like text; otherwise it is noted as skipped. A file that cannot be read is reported later."""
        suffix = os.path.splitext(bare_name(path))[1]
        if suffix in _TEXT:
            return True
        if suffix not in _BINARY:
            try:
                with open(path, "rb") as file:
                    if is_compressed(path) or b"\0" not in file.read(_SNIFFED):
                        return True
            except OSError:
                return True
        self.skipped[path] = None
        return False

    def _is_shown(self, name: str) -> bool:
        return not name.startswith(".") and name not in self._skip

    def _note_unreadable(self, error: OSError) -> None:
        self._unreadable[error.filename] = error.strerror or str(error)

    def _matches_suffix(self, name: str) -> bool:
        return not self._suffixes or bare_name(name).endswith(self._suffixes)

    def _add_url(self, url: str) -> None:
        try:
            system, inner = filesystem(url)
            with storage_errors(url, self._key):
                if glob.has_magic(inner):
                    infos = [info for info in system.glob(inner, detail=True).values() if info["type"] == "file"]
                elif system.isdir(inner):
                    listed: dict[str, dict[str, Any]] = system.find(inner, detail=True)
                    infos = [info for name, info in listed.items() if self._matches_suffix(name.rsplit("/", 1)[-1])]
                    if self._text_only:  # by name alone: to look inside would mean a request for each file
                        binary = [info for info in infos if os.path.splitext(bare_name(info["name"]))[1] in _BINARY]
                        self.skipped |= {system.unstrip_protocol(info["name"]): None for info in binary}
                        infos = [info for info in infos if info not in binary]
                else:
                    infos = [system.info(inner)]
        except RunError as error:
            self._problems += error.problems
            return
        if not infos:
            self._problems.append(f'{self._key}: "{url}" matches no file to read; correct it, or put files there.')
        stamps = ("ETag", "etag", "mtime", "LastModified", "updated", "created")
        for info in infos:
            stamp = next((str(info[name]) for name in stamps if name in info), "")
            path = system.unstrip_protocol(info["name"])
            self.files[path] = SourceFile(path, info.get("size"), stamp)

    def result(self) -> list[SourceFile]:
        """The non-empty files, sorted by path, or RunError."""
        problems = self._problems
        if self._unreadable:
            path, reason = min(self._unreadable.items())
            others = f", nor can {len(self._unreadable) - 1} more" if len(self._unreadable) > 1 else ""
            problems.append(f"{self._key}: {path} cannot be read ({reason}){others}; make it readable or remove it.")
        files = [file for _, file in sorted(self.files.items()) if file.size != 0]
        if self.files and not files and not problems:
            first, count = min(self.files), len(self.files)
            which = f"{first} is empty" if count == 1 else f"all {count} files are empty (the first is {first})"
            problems.append(f"{self._key}: {which}; name files that hold text.")
        refuse(problems)
        return files


def _and_more(count: int) -> str:
    return " is" if count == 1 else f" and {count - 1:,} more are"


def is_url(path: str) -> bool:
    return "://" in path


def is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def is_compressed(path: str) -> bool:
    return bare_name(path) != path.lower()


def bare_name(path: str) -> str:
    """The name in lower case, without the suffix of a compressed file."""
    name = path.lower()
    return next((name.removesuffix(suffix) for suffix in _GZIP + _ZSTD if name.endswith(suffix)), name)


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        return cast(tuple[Any, str], url_to_fs(url))
    except ImportError as error:  # fsspec names the package that serves the protocol
        raise RunError(f"{url}: {error}") from None
    except ValueError as error:
        raise RunError(f"{url}: no such kind of storage is known ({error}).") from None


@contextlib.contextmanager
def storage_errors(path: str, key: str = "", passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns any exception of a storage into a RunError that names the file. `passing`: exceptions that the caller handles."""
    prefix = f"{key}: " if key else ""
    try:
        yield
    except (RunError, MemoryError):
        raise
    except passing:
        raise
    except FileNotFoundError:
        raise RunError(f"{prefix}{path} is not there; correct the name, or put it back.") from None
    except Exception as error:  # each storage has exceptions of its own
        raise RunError(f"{prefix}{path} cannot be read ({str(error) or type(error).__name__}).") from None


def open_binary(path: str) -> BinaryIO:
    """The stored bytes of a file."""
    with storage_errors(path):
        if is_url(path):
            system, inner = filesystem(path)
            file = cast(BinaryIO, system.open(inner, "rb"))
            return file if not is_web(path) or _is_seekable(file) else _download(system, inner)
        return open(path, "rb")


def _is_seekable(file: BinaryIO) -> bool:
    """Whether a file of a web server can be read from any offset. A server may not support ranges, which fsspec notices only
    when it requests one."""
    try:
        file.seek(-1, io.SEEK_END)
        file.read(1)
        file.seek(0)
    except (ValueError, OSError):  # any other fault of the server shows in the download that follows
        file.close()
        return False
    return True


def _download(system: Any, inner: str) -> BinaryIO:
    """A temporary copy that disappears when it is closed."""
    with tempfile.NamedTemporaryFile() as copy:
        system.get_file(inner, copy.name)
        return open(copy.name, "rb")


def blocks(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    """The content of a file from its current position on."""
    return iter(partial(file.read, BLOCK), b"")


def decompressed(path: str) -> Iterator[bytes]:
    """The content of a file in blocks, decompressed if its name has the suffix of a compressed file. A damaged file raises a RunError
    that names it."""
    zstd = require("zstandard", ".zst", "data") if path.lower().endswith(_ZSTD) else None
    damages = (zlib.error, gzip.BadGzipFile) if zstd is None else (zstd.ZstdError,)
    with open_binary(path) as file, storage_errors(path):
        try:
            if zstd is not None:
                yield from _zstd_blocks(file, zstd)
            else:
                yield from blocks(gzip.GzipFile(fileobj=file) if path.lower().endswith(_GZIP) else file)
        except EOFError:
            raise RunError(f"{path} is cut off: its compressed data has no end; copy or make it again.") from None
        except damages as error:
            raise RunError(f"{path} is damaged ({error}): copy or make it again.") from None


def _zstd_blocks(file: BinaryIO, library: Any) -> Iterator[bytes]:
    """Decompresses zstd frames. The library's own reader takes a file that is cut off for one that ends; this one raises
    EOFError if the last frame is incomplete."""
    frame: Any = None
    for stored in iter(partial(file.read, _ZSTD_FEED), b""):
        while stored:
            frame = frame or library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            yield frame.decompress(stored)
            stored = frame.unused_data  # of the next frame, if this one has ended
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def require(package: str, what: str, extra: str) -> Any:
    """Import an optional package; raises RunError with the way to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise RunError(f"{what} needs the package {package.partition('.')[0]}: pip install 'phalanx[{extra}]'.") from None
