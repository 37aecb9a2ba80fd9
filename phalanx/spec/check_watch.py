"""Problems of the addresses and secrets in [watch]. Called by `spec/check`. No sentence repeats a secret."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit

from phalanx.spec.fields import ENVIRONMENT
from phalanx.spec.run import Run

_LEAST_TOKEN = 16
"""Characters of a token that cannot be guessed."""


def watch_problems(run: Run) -> Iterator[str]:
    """What is wrong with addresses and secrets."""
    watch = run.watch
    url, token = watch.alerts.url, watch.metrics_token
    if url is not None and ENVIRONMENT.fullmatch(url) is None and not _is_web_address(url):
        yield (
            '$(watch.alerts.url)watch.alerts.url is neither an address such as "https://hooks.example.com/…" nor "env:NAME" with the name of an '
            "environment variable: correct it, or remove it."
        )
    for key, value in (("otlp", watch.otlp), ("mlflow_uri", watch.mlflow_uri)):
        if value is not None and (parts := _split(value)) is not None and parts.password is not None:
            variables = (
                "OTEL_EXPORTER_OTLP_HEADERS" if key == "otlp" else "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
            yield (
                f"$(watch.{key})watch.{key} holds a password, which the run directory would show: remove it from the address, and set "
                f"{variables} in the environment."
            )
        elif key == "otlp" and value is not None and not _is_web_address(value):
            yield '$watch.otlp is no address such as "http://host:4318": correct it, or remove it.'
    if watch.mlflow_uri is not None and not watch.mlflow:
        yield "$watch.mlflow_uri is not used without watch.mlflow = true: set it, or remove watch.mlflow_uri.$(watch.mlflow)"
    if watch.metrics_port is None:
        if token is not None:
            yield "$(watch.metrics_token)watch.metrics_token is not used without watch.metrics_port: set it, or remove the token.$(watch.metrics_port)"
        return
    if token is None and not is_loopback(watch.metrics_host):
        yield (
            "$watch.metrics_host can be reached by others, so that a token is needed: set watch.metrics_token, such as "
            '"env:METRICS_TOKEN", or remove watch.metrics_host.$(watch.metrics_token)'
        )
    if token is not None and ENVIRONMENT.fullmatch(token) is None and (len(token) < _LEAST_TOKEN or not _is_header(token)):
        yield (
            f"$(watch.metrics_token)watch.metrics_token needs at least {_LEAST_TOKEN} printable characters without spaces, or the form "
            '"env:NAME": `openssl rand -hex 24` makes one.'
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_web_address(value: str) -> bool:
    parts = _split(value)
    return parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and value.isprintable()


def _split(value: str) -> SplitResult | None:
    try:
        parts = urlsplit(value)
        _ = parts.port  # raises if it is no number
    except ValueError:
        return None
    return parts


def _is_header(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token
