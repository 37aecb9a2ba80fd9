"""The hosts of a run that its owner lists in a file, and what they must agree on before it starts."""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.host_report import HostReport
from phalanx.spec.errors import RunError, did_you_mean

_CLOCK = 2.0  # seconds by which clocks may differ: records of several hosts are read in the order of their times
_DISK = 64 << 20  # bytes
_MEMORY = 0.05  # fraction
_KEYS = ("bind", "slots", "switch", "port", "user", "python")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One line of a hosts file."""

    name: str
    """Name or address, as ssh knows it."""
    bind: str | None = None
    """Its address in the run's network. Default: the one by which it is reached."""
    slots: int | None = None
    """Ranks that it can run. Default: its GPUs, or its share of the ranks."""
    switch: str = ""
    """Where it is in the network, from the outermost switch, such as "pod1/leaf3": neighboring ranks are on hosts that sort together."""
    port: int | None = None
    user: str | None = None
    python: str | None = None
    """Python interpreter that has Phalanx. Default: the path of the launcher's own."""


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a file: a name or address per line, with settings such as `slots=4` after it. `#` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise RunError(f"The hosts file {path} cannot be read ({reason}): name a file with one host per line.") from None
    problems: list[str] = []
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        if words := line.partition("#")[0].split():
            try:
                hosts.append(_host(words))
            except ValueError as error:
                problems.append(f"{path}:{number}: {error}")
    names = Counter((host.user, host.name, host.port, host.bind) for host in hosts)
    problems += [
        f"{path}: {key[1]} is listed {count} times: remove {count - 1} of them." for key, count in names.items() if count > 1
    ]
    if not hosts and not problems:
        problems.append(f"{path} lists no host: write one name or address per line.")
    if problems:
        raise RunError(problems)
    return hosts


def _host(words: list[str]) -> Host:
    name, *settings = words
    if name.startswith("-") or "=" in name:
        raise ValueError(f'"{name}" is not a host: a line begins with a name or an address.')
    user, at, name = name.rpartition("@")
    values: dict[str, str] = {"user": user} if at else {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in _KEYS or not equals or not value:
            known = f"known are {', '.join(_KEYS)}, as in slots=4{did_you_mean(_KEYS, key)}"
            raise ValueError(f'"{setting}" is not a setting of a host: {known}')
        values[key] = value
    numbers = {key: _positive(key, values.pop(key)) for key in ("slots", "port") if key in values}
    if (bind := values.get("bind")) is not None:
        try:
            address = ipaddress.ip_address(bind)
        except ValueError:
            raise ValueError(f"bind={bind} is not an IP address.") from None
        if address.is_unspecified:
            raise ValueError(f"bind={bind} means every interface, so anyone on the network could connect: name one address.")
    return Host(name=name, **values, slots=numbers.get("slots"), port=numbers.get("port"))


def _positive(key: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{key}={text} is not a positive whole number.")
    return int(text)


def disagreements(names: Sequence[str], reports: Sequence[HostReport], elapsed: Sequence[tuple[float, float]]) -> Iterator[str]:
    """What keeps hosts from training together. `elapsed`: when each was asked and had answered, by the launcher's clock."""
    for what in ("phalanx", "python", "torch"):
        found = [report.versions[what] for report in reports]
        yield from _odd(names, found, what)
    if len({report.versions["phalanx"] for report in reports}) == 1:
        yield from _odd(names, [report.code[:12] for report in reports], "Phalanx's source code")
    # A host's clock is read at some moment between question and answer.
    offsets = [_outside(report.clock, *times) for report, times in zip(reports, elapsed, strict=True)]
    middle = statistics.median_low(offsets)
    for name, offset in zip(names, offsets, strict=True):
        if abs(offset - middle) > _CLOCK:
            late = "ahead of" if offset > middle else "behind"
            yield (
                f"The clock of {name} is {abs(offset - middle):.0f} s {late} the others: synchronize it, for example with chrony, "
                "or remove the host."
            )
    counts = [len(report.machine.gpus) for report in reports]
    yield from _odd(
        names, [f"{count} GPUs" for count in counts], "the number of GPUs", remedy="give hosts with more of them slots=N"
    )


def shortages(names: Sequence[str], reports: Sequence[HostReport], run_dir: Path) -> Iterator[str]:
    """Hosts without the disk space and memory that any run needs."""
    for name, report in zip(names, reports, strict=True):
        if report.free_disk < _DISK:
            yield (
                f"{name} has {report.free_disk >> 20} MiB free for {run_dir}, and logs alone need {_DISK >> 20} MiB: free some, or remove the "
                "host."
            )
        if report.free_memory < _MEMORY * report.machine.memory:
            yield (
                f"{name} has {report.free_memory >> 20} MiB of its {report.machine.memory >> 20} MiB memory free: end what uses it, or remove "
                "the host."
            )


def _odd(names: Sequence[str], found: Sequence[str], what: str, remedy: str = "install the same on all hosts") -> Iterator[str]:
    """A sentence for each host that differs from most."""
    usual = Counter(found).most_common(1)[0][0]
    for name, value in zip(names, found, strict=True):
        if value != usual:
            yield f"{what} of {name} is {value or 'missing'}, but {usual or 'missing'} on most hosts: {remedy}, or remove the host."


def _outside(clock: float, asked: float, answered: float) -> float:
    """Seconds by which a clock is outside of the time in which it was read."""
    return min(0.0, clock - asked) + max(0.0, clock - answered)
