"""Links that messages share: whoever travels at the same time divides the bandwidth. `planning/simulate/simulated_step` sends over them."""

from __future__ import annotations

from dataclasses import dataclass

Link = tuple[str, int]
"""Its kind, and the rank that it belongs to."""


@dataclass(slots=True, eq=False)
class Flow:
    """One message under way."""

    links: tuple[Link, ...]
    left: float
    """Seconds that it still takes if it has its links for itself."""
    begun: float
    rate: float = 1.0
    since: float = 0.0
    """When `left` was true."""
    version: int = 0
    """Of its arrival: one that was foretold before the rate changed is not to be believed."""

    @property
    def arrives(self) -> float:
        return self.since + self.left / self.rate


class Links:
    """Every link gives all that use it an equal share; a message goes as fast as its worst link lets it."""

    def __init__(self) -> None:
        self._on: dict[Link, list[Flow]] = {}

    def start(self, links: tuple[Link, ...], seconds: float, now: float) -> tuple[Flow, list[Flow]]:
        """A new message, and all whose arrival has changed by it, itself among them."""
        flow = Flow(links, seconds, now, since=now)
        for link in links:
            self._on.setdefault(link, []).append(flow)
        return flow, self._settle(links, now)

    def stop(self, flow: Flow, now: float) -> list[Flow]:
        """It has arrived. All whose arrival has changed by that."""
        for link in flow.links:
            self._on[link].remove(flow)
        return self._settle(flow.links, now)

    def _settle(self, links: tuple[Link, ...], now: float) -> list[Flow]:
        changed = []
        for flow in {id(flow): flow for link in links for flow in self._on[link]}.values():
            rate = min(1.0 / len(self._on[link]) for link in flow.links)
            if rate != flow.rate or flow.version == 0:
                flow.left -= (now - flow.since) * flow.rate
                flow.since, flow.rate, flow.version = now, rate, flow.version + 1
                changed.append(flow)
        return changed
