"""Serves the figures of one run for Prometheus, and nothing else. The sink process of a run with `watch.metrics_port` runs it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from phalanx.watch.http_messages import MAX_HEAD, Request, Response
from phalanx.watch.page_server import PageServer


class MetricsServer(PageServer):
    """The server of the page without the page."""

    async def start_at(self, port: int) -> asyncio.Server:
        """Listen at this port and no other: somebody has written it into a scrape configuration. Raises OSError."""
        return await asyncio.start_server(self._serve, self.access.host, port, limit=MAX_HEAD, backlog=256)

    async def _route(self, request: Request) -> Response:
        if request.path == "/metrics":
            return await self.metrics(request)
        return Response(b"There is only /metrics.\n", status=HTTPStatus.NOT_FOUND)
