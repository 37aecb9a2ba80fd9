"""Writes docs/history.md, and the figures at the head of the examples that repeat published runs: published figures next to the
predictions of `phalanx plan` for the same layout on the same hardware. `make docs` runs it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

from phalanx.planning.cost.run_cost import price_and_energy
from phalanx.planning.machines.hardware import Hardware, hardware
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import judge
from phalanx.spec.load import load
from phalanx.spec.run import Run

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from planner.parameters import PAIRED  # noqa: E402

BEGIN, END = "# made by docs/make_history.py: begin\n", "# made by docs/make_history.py: end\n"
_HOUR, _DAY, _WIDTH = 3600.0, 86400.0, 128


@dataclass(frozen=True, kw_only=True)
class Published:
    """Published figures of a run. None: not published."""

    title: str
    said: str
    """The figures as a sentence, with their source."""
    step: float | None = None
    """Seconds."""
    mfu: float | None = None
    hours: float | None = None
    """Device-hours of the whole run."""
    settings: tuple[str, ...] = ()
    """Settings of the published run that do not fit in Phalanx, which needs more memory. The example omits them, and the plan fills in
    values that fit."""
    note: str = ""


# Only figures from the sources. Derived figures are computed below and marked as derived.
PUBLISHED = {
    "gpt3-175b": Published(
        title="GPT-3 175B",
        said="32 s a step on 1,024 A100 (Megatron-LM README); an estimate of 34 days for the run (Narayanan et al., 2021). The original run "
        "took 3,640 petaflop/s-days on V100 (Brown et al., 2020).",
        step=32.0,
        note="OpenAI did not publish its layout; this is the layout of Megatron-LM.",
    ),
    "mt-nlg-530b": Published(
        title="MT-NLG 530B",
        said="60.1 s a step on 2,240 A100, 126 TFLOP/s each (Smith et al., 2022).",
        step=60.1,
    ),
    "palm-540b": Published(
        title="PaLM 540B",
        said="1,200 hours on 6,144 TPU v4 and 336 hours on 3,072, downtime and repeated steps included; 238,300 tokens/s, 46.2 % MFU "
        "(Chowdhery et al., 2022).",
        step=2048 * 2048 / 238.3e3,
        mfu=0.462,
        hours=1200 * 6144 + 336 * 3072,
        settings=("train.micro_batch=4", "memory.recompute=full", "memory.offload=none"),
        note="PaLM computes attention and feed-forward in parallel, and starts with smaller batches. The prediction models neither.",
    ),
    "llama2-70b": Published(
        title="Llama 2 70B",
        said="1,720,320 A100-hours (Touvron et al., 2023), which is 35 days on 2,048 devices.",
        hours=1_720_320,
        note="Its layout was not published; this is a common one.",
    ),
    "llama3-405b": Published(
        title="Llama 3 405B",
        said="400 TFLOP/s, 41 % MFU at 8,192 tokens on 16,384 H100 (Llama Team, 2024); 30.84M H100-hours (model card of Llama 3.1, "
        "long context, annealing and downtime included); more than 90 % effective training time.",
        mfu=0.41,
        hours=30.84e6,
        settings=("memory.recompute=none", "memory.offload=none"),
    ),
    "deepseek-v3": Published(
        title="DeepSeek-V3",
        said="2.664M H800-hours of pre-training, 180,000 for each trillion tokens, 5.328M dollars at 2 dollars an hour "
        "(DeepSeek-AI, 2024).",
        hours=2.664e6,
        settings=("memory.compile=false", "memory.recompute=selective", "memory.offload=none"),
        note="The prediction omits multi-token prediction and the smaller batches at the start. The overlap of DualPipe-V was set with these "
        "hours in view, so this is not an independent prediction.",
    ),
}


@dataclass(frozen=True)
class Row:
    """A published run and its prediction."""

    name: str
    published: Published
    run: Run
    machines: Hardware
    option: Candidate
    """With the settings of the published run."""
    fitting: Candidate
    """With the settings of the run file; the plan fills in values that fit."""

    @property
    def hours(self) -> float:
        """Published device-hours, or those that follow from the published step time."""
        if self.published.hours is not None:
            return self.published.hours
        assert self.published.step is not None, "one of the two is known"
        return self.published.step * self.run.steps * self.machines.gpus / _HOUR

    @property
    def days(self) -> float:
        """Days on all devices."""
        return self.hours / self.machines.gpus / 24

    def published_lines(self) -> list[str]:
        known = "" if self.published.hours is not None else ", computed from the step time"
        price = (
            f", {_money(self.hours * self.machines.price)} at {self.machines.price:.2f} an hour" if self.machines.price else ""
        )
        return [
            f"Published: {self.published.said}",
            f"  {self.days:.1f} days{known} on {self.machines.gpus:,} devices, {_hours(self.hours)}{price}.",
        ]

    def predicted_lines(self) -> list[str]:
        lines = self._lines("Predicted", self.option)
        if not self.option.fits or self.fitting.seconds > 1.02 * self.option.seconds:
            how = f"recompute {self.fitting.recompute}, micro-batch {self.fitting.micro_batch}, offload {self.fitting.offload}"
            lines += self._lines(f"In Phalanx, with settings that fit ({how})", self.fitting)
        return lines

    def _lines(self, what: str, option: Candidate) -> list[str]:
        seconds = self.seconds(option)
        dollars, joules = price_and_energy(self.machines, option.layout.ranks, seconds)
        mfu = f", {option.mfu:.1%} MFU" if option.mfu is not None else ""
        price = f", {_money(dollars)}" if dollars is not None else ""
        energy = f", {joules / 3.6e12:.1f} GWh" if joules is not None else ""
        return [
            f"{what}: {option.seconds:.2f} s a step (P10 {option.low:.2f}, P90 {option.high:.2f}){mfu}, goodput {option.goodput:.1%}:",
            f"  {seconds / _DAY:.1f} days, {_hours(option.layout.ranks * seconds / _HOUR)}{price}{energy}; {_memory(option)}.",
        ]

    def seconds(self, option: Candidate) -> float:
        """Of the whole run, including what failures and saving waste."""
        return option.seconds * self.run.steps / option.goodput

    def cells(self) -> list[str]:
        option, step = self.option, self.published.step
        seconds = self.seconds(option)
        dollars, _ = price_and_energy(self.machines, option.layout.ranks, seconds)
        return [
            f"[{self.published.title}](../examples/{self.name}.toml)",
            f"{self.machines.gpus:,} × {self.machines.gpu.key}",
            f"{self.run.steps * self.run.batch_tokens / 1e12:.2f}T",
            "" if step is None else f"{step:.1f} s",
            f"{option.seconds:.1f} s ({option.low:.1f}–{option.high:.1f})",
            f"{self.days:.1f}",
            f"{seconds / _DAY:.1f}",
            _hours(self.hours),
            _hours(option.layout.ranks * seconds / _HOUR),
            "" if self.machines.price is None else _money(self.hours * self.machines.price),
            "" if dollars is None else _money(dollars),
            f"{self.seconds(self.fitting) / _DAY:.1f}",
            f"{self.fitting.bytes / 2**30:.0f} / {self.fitting.capacity / 2**30:.0f}",
        ]


def rows() -> list[Row]:
    found = []
    for name, published in PUBLISHED.items():
        run = load(ROOT / "examples" / f"{name}.toml")
        machines = hardware(run, None)
        # Predict the authors' own program: DeepSeek's splits backwards and keeps received tokens whatever it recomputes, rounds inside other
        # kernels, and multiplies routed experts in 8 bits too.
        own = (("paired", PAIRED), ("splits", 1.0), ("resent", 0.0), ("rounding", 0.0), ("eight", 1.0))
        theirs = replace(machines, measured=(*machines.measured, *own))
        as_run = judge(load(ROOT / "examples" / f"{name}.toml", published.settings), theirs)
        found.append(Row(name, published, run, machines, as_run, judge(run, machines)))
    return found


def page(found: list[Row]) -> str:
    titles = (
        "run", "devices", "tokens", "step published", "step predicted (P10–P90)", "days published", "days predicted", "hours published",
        "hours predicted", "price of published hours", "price predicted",
        "days in Phalanx, with settings that fit", "GiB of its fullest rank",
    )  # fmt: skip
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *(row.cells() for row in found)))
    notes = "\n".join(f"- **{row.published.title}.** {row.published.said} {row.published.note}".rstrip() for row in found)
    return f"""# The cost of scale

Six published runs. Each is a run file in [examples](../examples) with its layout. The table shows the published figures next to the predictions
for the same layout, with the hardware of the [catalogue](catalogue.md) and the planner's constants. [planner-accuracy.md](planner-accuracy.md) describes
these constants and their errors. Some of the steps below are among the data that they were fitted to.

{table}

Predicted days and hours include failures and saving as Phalanx handles them. Published ones include all interruptions, or are computed from the
published step time where no hours were published. Prices use the catalogue's price for a device-hour (`phalanx clusters`): today's prices, not
those of the time. Some of these runs needed less memory than Phalanx, whose blocks keep more for the backward. The last two columns show the run file in
Phalanx, with recomputation and micro-batch chosen by the plan.

{notes}

`make docs` generates this page and the figures at the head of the run files.
"""


def headed(text: str, row: Row) -> str:
    """The text of a run file with the figures between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"examples/{row.name}.toml has no marks"
    lines = [*row.published_lines(), *row.predicted_lines()]
    # Continuation lines are indented.
    wrapped = (fill(line, _WIDTH, break_on_hyphens=False, initial_indent="# ", subsequent_indent="#   ") for line in lines)
    return before + BEGIN + "".join(f"{line}\n" for line in wrapped) + END + after


def _hours(hours: float) -> str:
    return f"{hours / 1e6:.2f}M device-hours" if hours >= 1e6 else f"{hours / 1e3:,.0f}K device-hours"


def _memory(option: Candidate) -> str:
    said = f"{option.bytes / 2**30:.1f} of {option.capacity / 2**30:.1f} GiB"
    return said if option.fits else f"{said}, which does not fit in Phalanx"


def _money(dollars: float) -> str:
    return f"${dollars / 1e6:.1f}M" if dollars >= 1e6 else f"${dollars / 1e3:,.0f}K"


if __name__ == "__main__":
    made = rows()
    (ROOT / "docs" / "history.md").write_text(page(made))
    for row in made:
        path = ROOT / "examples" / f"{row.name}.toml"
        path.write_text(headed(path.read_text(), row))
