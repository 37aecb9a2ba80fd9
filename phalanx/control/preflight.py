"""The check of all hosts before the first generation, whatever has started them: that they agree with each other, that their devices compute
rightly, and that their links and devices are fast enough. Each node reports (`control/node_check`), the rules of `host/host_check` judge. A host
that fails gets no ranks, if the others can train without it; otherwise the run ends.

A run on one node is not checked, and nodes on one machine only for what they compute: there is nothing to compare.
"""

from __future__ import annotations

import ipaddress
import time
from dataclasses import replace

from phalanx.control import protocol
from phalanx.control.controller_state import Control
from phalanx.control.node_check import COMPUTE_SECONDS
from phalanx.control.recover import Replanner
from phalanx.events.records import HostsChecked, Warned
from phalanx.host import host_check
from phalanx.host.host_check import HostProblem, Pair
from phalanx.recovery.policy import decide
from phalanx.recovery.relayout import initial_assignment
from phalanx.recovery.state import EndRun, Failure, NewGeneration, Situation, Wait
from phalanx.spec.plan import Plan

_REPORT_SECONDS = 20.0  # in which a host reports: GPU drivers take up to 10 s
_LINK_SECONDS = 10.0  # for all links
_DIRECTION_SECONDS = 0.2  # for one direction of one link
_ANSWER_SECONDS = 6.0  # that a link may take longer, before it counts as one that cannot connect
_ATTEMPTS = 3  # at a slow link: the machines may have been busy


class Preflight:
    """One check of all hosts that have joined."""

    def __init__(self, control: Control, replanner: Replanner):
        self._control, self._state, self._agent = control, control.state, control.agent
        self._replanner, self._plan = replanner, control.agent.plan
        self._min_speed = control.agent.run.cluster.min_speed
        self._slots = self._state.nodes(all_of_them=True)
        self._problems: list[HostProblem] = []
        self._asked = 0.0

    async def run(self) -> tuple[Plan, tuple[int, ...]] | None:
        """Check the hosts; returns the plan of the first generation, and the node of each of its ranks. None: the run has ended."""
        if self._agent.nodes > 1:
            await self._check()
        return self._choose()

    async def _check(self) -> None:
        begin, state = time.time(), self._state
        self._problems = [
            HostProblem(node, f"The run's data cannot be read on {member.problem}")
            for node, member in sorted(state.members.items())
            if member.problem
        ]
        one_machine = ipaddress.ip_address(self._agent.address[0]).is_loopback
        await self._ask()
        if not one_machine:
            self._compare_hosts()
        self._judge_devices()
        rates: dict[Pair, float] = {}
        if not one_machine:
            await self._measure_links()
            rates = self._rates()
            self._judge_links(rates)
        rejected = dict.fromkeys(problem.host for problem in self._problems)
        checked = HostsChecked(
            hosts={str(node): report.report.machine.host for node, (report, _) in state.checks.reports.items()},
            seconds=time.time() - begin,
            links={f"{first}-{second}": rate for (first, second), rate in rates.items()},
            round_trips={
                f"{first}-{second}": link.speed.round_trip
                for (first, second), link in state.checks.links.items()
                if link.speed is not None
            },
            flops={str(node): min(result.flops for result in results) for node, results in state.checks.computed.items()},
            rejected=len(rejected),
        )
        self._agent.emit(checked)
        for node in rejected:
            message = " ".join(problem.message for problem in self._problems if problem.host == node)
            self._control.reject(node, checked.hosts.get(str(node), ""), message)

    # --- what the nodes report ---

    async def _ask(self) -> None:
        """Have every node report its host and what it computes."""
        state, checks = self._state, self._state.checks
        self._asked = time.time()
        trains = self._agent.run.command.program is None
        self._control.order(protocol.CheckHost(compute=self._plan.compute if trains else "", device=self._plan.device))
        await self._control.until(lambda: state.members.keys() <= checks.reports.keys(), _REPORT_SECONDS)
        if not trains:
            return  # nobody knows what the program computes with
        more = self._plan.device != "cpu"  # the CPU of a host with GPUs is checked, too

        def complete() -> bool:
            return all(
                len(checks.computed.get(node, ())) >= member.join.slots + more
                for node, member in state.members.items()
                if node in checks.reports
            )

        await self._control.until(complete, COMPUTE_SECONDS + _ANSWER_SECONDS)

    def _compare_hosts(self) -> None:
        answers = self._state.checks.reports
        known = sorted(answers)
        for node in self._slots:
            if node not in answers:
                message = (
                    f"{self._name(node)} has not reported within {_REPORT_SECONDS:.0f} s: look at its log, or remove the host."
                )
                self._problems.append(HostProblem(node, message))
        if not known:
            return
        names, reports = [self._name(node) for node in known], [answers[node][0].report for node in known]
        found = [
            *host_check.disagreements(names, reports, [(self._asked, answers[node][1]) for node in known]),
            *host_check.shortages(names, reports, str(self._agent.rundir.path.absolute())),
        ]
        self._problems += [HostProblem(known[host], message) for host, message in found]

    def _judge_devices(self) -> None:
        results = [
            replace(result, host=node) for node, found in sorted(self._state.checks.computed.items()) for result in found
        ]
        names = [self._name(node) for node in range(1 + max(self._slots))]
        self._problems += host_check.device_problems(names, results, self._min_speed)

    # --- links ---

    async def _measure_links(self) -> None:
        """Measure the links of hosts that are right so far; slow ones again, as long as there is time."""
        wrong, deadline = {problem.host for problem in self._problems}, time.monotonic() + _LINK_SECONDS
        healthy = [node for node in self._slots if node not in wrong and node in self._state.checks.reports]
        rounds = host_check.link_rounds(healthy) if len(healthy) > 1 else []
        best: dict[Pair, protocol.LinkMeasured] = {}
        for _ in range(_ATTEMPTS):
            for pairs in rounds:
                if time.monotonic() > deadline or self._state.stop_requested is not None:
                    break
                await self._measure(pairs)
                for pair in pairs:
                    link = self._state.checks.links.get(pair)
                    if link is not None and (pair not in best or _speed(link) > _speed(best[pair])):
                        best[pair] = link
            self._state.checks.links = dict(best)
            hosts, pairs = host_check.slow_links(rates, self._limit(rates)) if (rates := self._rates()) else ([], [])
            rounds = host_check.disjoint_rounds([pair for pair in rates if pair in pairs or {*pair} & {*hosts}])

    async def _measure(self, pairs: list[Pair]) -> None:
        checks = self._state.checks
        for pair in pairs:
            checks.links.pop(pair, None)
        addresses = {str(node): answer.link_server for node, (answer, _) in checks.reports.items()}
        self._control.order(
            protocol.MeasureLinks(pairs=[list(pair) for pair in pairs], addresses=addresses, seconds=_DIRECTION_SECONDS)
        )
        living = self._state.members
        await self._control.until(
            lambda: all(pair in checks.links or not {*pair} <= living.keys() for pair in pairs),
            2 * _DIRECTION_SECONDS + _ANSWER_SECONDS,
        )
        for pair in pairs:
            if {*pair} <= living.keys():
                lost = protocol.LinkMeasured(peer=pair[1], speed=None, problem=f"no answer within {_ANSWER_SECONDS:.0f} s")
                checks.links.setdefault(pair, lost)

    def _rates(self) -> dict[Pair, float]:
        return {pair: _speed(link) for pair, link in sorted(self._state.checks.links.items())}

    def _limit(self, rates: dict[Pair, float]) -> float:
        """Bytes/s that a link must deliver. What all of them deliver is the network, not the fault of a host."""
        return self._min_speed * min(self._assumed, host_check.usual_speed(rates))

    @property
    def _assumed(self) -> float:
        """Bytes/s that the plan assumes, as far as one stream can show."""
        return min(self._plan.host_link or host_check.STREAM_SPEED, host_check.STREAM_SPEED)

    def _judge_links(self, rates: dict[Pair, float]) -> None:
        if not rates:
            return
        limit, links = self._limit(rates), self._state.checks.links
        key = f"cluster.min_speed = {self._min_speed:g}"
        remedy = "look at its cable, port and switch, or remove the host."
        hosts, pairs = host_check.slow_links(rates, limit)
        for node in hosts:
            own = {pair: rate for pair, rate in rates.items() if node in pair}
            pair = max(own, key=lambda pair: own[pair])
            if own[pair]:
                message = (
                    f"The link of {self._name(node)} delivers {_mb(own[pair])} at most (to {self._name(sum(pair) - node)}), but {_mb(limit)} "
                    f"are needed, {key} of what links deliver or the plan assumes: {remedy}"
                )
            else:
                message = (
                    f"{self._name(node)} cannot connect to {self._name(sum(pair) - node)}: {links[pair].problem}; open the ports between "
                    "hosts, or remove the host."
                )
            self._problems.append(HostProblem(node, message))
        for pair in pairs:
            names = " and ".join(map(self._name, pair))
            self._agent.emit(
                Warned(
                    message=f"The link between {names} delivers {_mb(rates[pair])}, but {_mb(limit)} are expected ({key}): steps wait for it. "
                    "Both have faster links to other hosts, so neither is left out."
                )
            )
        usual = host_check.usual_speed(rates)
        if self._plan.host_link is not None and usual < self._min_speed * self._assumed:
            slowest = min(rates, key=lambda pair: rates[pair])
            self._agent.emit(
                Warned(
                    message=f"The links between hosts deliver {_mb(usual)} (slowest: {' and '.join(map(self._name, slowest))}, "
                    f"{_mb(rates[slowest])}), but the plan assumes {_mb(self._plan.host_link)}: steps may take longer than promised."
                )
            )

    # --- the decision ---

    def _choose(self) -> tuple[Plan, tuple[int, ...]] | None:
        """The plan and the nodes of its ranks, without rejected hosts. Ends the run if it cannot train without them."""
        state, plan = self._state, self._plan
        healthy = state.nodes(all_of_them=True)
        if sum(healthy.values()) >= plan.processes:
            return plan, initial_assignment(plan.process_layout, healthy)
        lost = [Failure("node lost", None, None, self._reason(node), node) for node in self._slots if node not in healthy]
        trains = self._agent.run.command.program is None
        situation = Situation(
            wanted=plan.process_layout,
            layout=plan.process_layout,
            assignment=initial_assignment(plan.process_layout, self._slots),
            nodes=healthy,
            settings=self._control.settings,
            counts_steps=trains,
            batch=self._agent.run.batch if trains and plan.devices_per_process == 1 else None,
        )
        action = decide(situation, lost, self._replanner.legal)
        if isinstance(action, NewGeneration) and (smaller := self._replanner.plan(action.layout)) is not None:
            names = ", ".join(self._name(node) for node in self._slots if node not in healthy)
            self._agent.emit(Warned(message=f"The run starts without {names}: on {smaller.ranks} of {plan.ranks} ranks."))
            return smaller, action.assignment
        why = f" ({action.reason})" if isinstance(action, Wait) else ""
        reasons = "\n".join(f"- {failure.reason}" for failure in lost)
        ending = action.story if isinstance(action, EndRun) and not self._problems else ""
        self._control.end(1, ending or f"The run cannot start without hosts that failed the check{why}:\n{reasons}")
        return None

    def _reason(self, node: int) -> str:
        messages = [problem.message for problem in self._problems if problem.host == node]
        return " ".join(messages) or f"{self._name(node)} was lost before the first step."

    def _name(self, node: int) -> str:
        answer = self._state.checks.reports.get(node)
        return f"node {node}" if answer is None else f"{answer[0].report.machine.host} (node {node})"


def _speed(link: protocol.LinkMeasured) -> float:
    return 0.0 if link.speed is None else min(link.speed.there, link.speed.back)


def _mb(rate: float) -> str:
    return f"{rate / 1e6:,.0f} MB/s"
