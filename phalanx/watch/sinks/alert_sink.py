"""Sends alerts to a webhook, as JSON that Slack and Mattermost read: "text" for people, and "phalanx" with the same in fields."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from phalanx._version import __version__
from phalanx.events.records import Event
from phalanx.spec.json_value import JsonObject
from phalanx.watch.sinks.alert_rules import Alert, Disk, Rules
from phalanx.watch.sinks.outbox import Outbox
from phalanx.watch.sinks.sink import SinkSettings

_TIMEOUT = 10.0
_LOCK_SECONDS = 5.0
_WAITING = 100
"""Alerts that wait for the webhook, at most."""
_AN_HOUR = 60
"""Messages in an hour, at most."""


class AlertSink:
    """Judges records, and sends what is worth a message."""

    def __init__(self, settings: SinkSettings):
        assert settings.alert_url is not None
        self._settings, self._url = settings, settings.alert_url
        self._rules = Rules(settings.run.watch.alerts, _disks(settings))
        self._outbox = Outbox[Alert](self._send, limit=_WAITING)
        self._sent: list[float] = []

    def receive(self, events: Sequence[Event]) -> None:
        for event in events:
            self._outbox.add(self._rules.on_event(event))
        if not events:
            self._outbox.add(self._rules.on_time(time.time()))
        self._deliver()

    def close(self) -> None:
        if self._rules.ended or self._is_over():  # else another host has taken over
            self._outbox.add(self._rules.on_close(time.time()))
        self._deliver(at_once=True)

    def _is_over(self) -> bool:
        """Whether nobody trains any more. A launcher that is killed closes its pipes a moment before its lock."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while self._settings.rundir.is_running:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOCK_SECONDS / 50)
        return True

    def _deliver(self, *, at_once: bool = False) -> None:
        if (error := self._outbox.deliver(at_once=at_once)) is not None:
            self._settings.warn(
                f"watch.alerts.url does not take alerts ({error}): the run goes on, and they are sent again later. `phalanx alerts test RUN.toml` "
                "tries it."
            )

    def _send(self, batch: list[Alert]) -> None:
        now = time.monotonic()
        self._sent = [sent for sent in self._sent if now - sent < 3600.0]
        if len(self._sent) >= _AN_HOUR:
            raise BlockingIOError(f"{_AN_HOUR} messages were sent within an hour")
        for alert in batch:
            post(self._url, message(self._settings.name, alert, dropped=self._outbox.dropped))
            self._sent.append(now)


def message(run: str, alert: Alert, *, dropped: int = 0) -> JsonObject:
    """The JSON of an alert."""
    where = "" if alert.step is None else f", step {alert.step:,}"
    notes = [f"{alert.more} more of this kind since the last message."] if alert.more else []
    notes += [f"{dropped} earlier messages were dropped."] if dropped else []
    text = f"Phalanx run {run}{where}: {alert.kind}. {' '.join([_sentence(alert.sentence), alert.remedy, *notes])}"
    fields: JsonObject = {
        "alert": alert.kind, "run": run, "step": alert.step, "time": alert.time, "host": socket.gethostname(), "sentence": alert.sentence,
        "remedy": alert.remedy, "more": alert.more, "dropped": dropped, "version": __version__,
    }  # fmt: skip
    return {"text": text, "phalanx": fields}


def _sentence(words: str) -> str:
    return words if words.endswith((".", "!", "?", "…")) else f"{words}."


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the message to an address that nobody has named."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def post(url: str, body: JsonObject) -> None:
    """Send JSON. Raises OSError whose text does not have the address, which is a secret."""
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "User-Agent": f"phalanx/{__version__}"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT) as response:
            response.read(1 << 10)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"{urlsplit(url).hostname} answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        why = error.reason
        raise OSError(f"{urlsplit(url).hostname}: {why.strerror or why if isinstance(why, OSError) else why}") from None
    except (TimeoutError, http.client.HTTPException, ValueError) as error:
        raise OSError(f"{urlsplit(url).hostname}: {type(error).__name__}") from None


def _disks(settings: SinkSettings) -> tuple[Disk, ...]:
    """The file systems of the run directory and of a folder for checkpoints elsewhere."""
    paths = {f"the run directory {settings.rundir.path}": settings.rundir.path}
    url = (settings.run.checkpoint.url or "").removeprefix("file://")
    if url and "://" not in url:
        paths[f"checkpoint.url = {url}"] = Path(url).expanduser()
    return tuple(Disk(name, lambda path=path: _free(path)) for name, path in paths.items())  # type: ignore[misc]


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def open_sink(settings: SinkSettings) -> AlertSink:
    return AlertSink(settings)
