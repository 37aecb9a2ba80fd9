"""Writes docs/history.md, and the figures at the head of the examples that repeat published runs: what was published beside what
`phalanx plan` predicts for the same layout on the same machines. `make docs` runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

from phalanx.planning.cost.run_cost import Cost, cost
from phalanx.planning.machines.hardware import Hardware, hardware
from phalanx.planning.machines.rates import PAIRED
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import judge
from phalanx.spec.load import load
from phalanx.spec.run import Run

ROOT = Path(__file__).parents[1]
BEGIN, END = "# made by docs/make_history.py: begin\n", "# made by docs/make_history.py: end\n"
_HOUR, _WIDTH = 3600.0, 128


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of a run. Left out: not published."""

    title: str
    said: str
    """The figures in words, with their source."""
    step: float | None = None
    """Seconds."""
    mfu: float | None = None
    hours: float | None = None
    """Device-hours of the whole run."""
    settings: tuple[str, ...] = ()
    """Keys that it had and the example leaves open, because Phalanx keeps more in memory: the plan fills in what fits."""
    note: str = ""


# Only figures that stand in the sources; what follows from them by arithmetic is computed below and told as such.
PUBLISHED = {
    "gpt3-175b": Published(
        title="GPT-3 175B",
        said="32 s a step on 1,024 A100 (Megatron-LM README); 34 days estimated for that (Narayanan et al., 2021). The first one took "
        "3,640 petaflop/s-days on V100 (Brown et al., 2020).",
        step=32.0,
        note="OpenAI's own layout was not published; this is Megatron-LM's.",
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
        note="PaLM computes attention and feed-forward side by side; smaller batches at the beginning.",
    ),
    "llama2-70b": Published(
        title="Llama 2 70B",
        said="1,720,320 A100-hours (Touvron et al., 2023), as of 35 days on 2,048.",
        hours=1_720_320,
        note="Its layout was not published; this is a usual one.",
    ),
    "llama3-405b": Published(
        title="Llama 3 405B",
        said="400 TFLOP/s, 41 % MFU at 8,192 tokens on 16,384 H100 (Llama Team, 2024); 30.84M H100-hours (model card of Llama 3.1, long "
        "context, annealing and downtime included); more than 90 % of the time effective.",
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
        note="Without multi-token prediction; smaller batches at the beginning. How much DualPipe-V hides was set with these hours in view: "
        "no independent prediction.",
    ),
}


@dataclass(frozen=True)
class Row:
    """A run beside its prediction."""

    name: str
    published: Published
    run: Run
    machines: Hardware
    option: Candidate
    """As it was run."""
    fitting: Candidate
    """As the run file says, with what fits filled in."""

    @property
    def hours(self) -> float:
        """Published device-hours, or those of the published step."""
        if self.published.hours is not None:
            return self.published.hours
        assert self.published.step is not None, "one of the two is known"
        return self.published.step * self.run.steps * self.machines.gpus / _HOUR

    @property
    def days(self) -> float:
        """On all machines at once."""
        return self.hours / self.machines.gpus / 24

    def published_lines(self) -> list[str]:
        known = "" if self.published.hours is not None else ", from its steps"
        price = (
            f", {_money(self.hours * self.machines.price)} at {self.machines.price:.2f} an hour" if self.machines.price else ""
        )
        return [
            f"Published: {self.published.said}",
            f"  {self.days:.1f} days{known} on {self.machines.gpus:,} devices, {_hours(self.hours)}{price}.",
        ]

    def predicted_lines(self) -> list[str]:
        lines = self._lines("Predicted", self.option)
        if not self.option.fits:
            how = f"recompute {self.fitting.recompute}, micro-batch {self.fitting.micro_batch}, offload {self.fitting.offload}"
            lines += self._lines(f"In Phalanx, with what fits ({how})", self.fitting)
        return lines

    def _lines(self, what: str, option: Candidate) -> list[str]:
        spent = self.spent(option)
        mfu = f", {option.mfu:.1%} MFU" if option.mfu is not None else ""
        price = f", {_money(spent.dollars)}" if spent.dollars is not None else ""
        energy = f", {spent.kwh / 1e6:.1f} GWh" if spent.kwh is not None else ""
        return [
            f"{what}: {option.seconds:.2f} s a step (P10 {option.low:.2f}, P90 {option.high:.2f}){mfu}, goodput {option.goodput:.1%}:",
            f"  {spent.days:.1f} days, {_hours(spent.gpu_hours)}{price}{energy}; {_memory(option)}.",
        ]

    def spent(self, option: Candidate) -> Cost:
        return cost(
            self.machines, step=option.seconds, steps=self.run.steps, goodput=option.goodput, devices=option.layout.ranks
        )

    def cells(self) -> list[str]:
        option, step = self.option, self.published.step
        spent = cost(
            self.machines, step=option.seconds, steps=self.run.steps, goodput=option.goodput, devices=option.layout.ranks
        )
        return [
            f"[{self.published.title}](../examples/{self.name}.toml)",
            f"{self.machines.gpus:,} × {self.machines.gpu.key}",
            f"{self.run.steps * self.run.batch_tokens / 1e12:.2f}T",
            "" if step is None else f"{step:.1f} s",
            f"{option.seconds:.1f} s ({option.low:.1f}–{option.high:.1f})",
            f"{self.days:.1f}",
            f"{spent.days:.1f}",
            _hours(self.hours),
            _hours(spent.gpu_hours),
            "" if self.machines.price is None else _money(self.hours * self.machines.price),
            "" if spent.dollars is None else _money(spent.dollars),
            f"{self.spent(self.fitting).days:.1f}",
            f"{self.fitting.bytes / 2**30:.0f} / {self.fitting.capacity / 2**30:.0f}",
        ]


def rows() -> list[Row]:
    found = []
    for name, published in PUBLISHED.items():
        run = load(ROOT / "examples" / f"{name}.toml")
        machines = hardware(run, None)
        # Their own programs are meant here: DeepSeek's hides messages that ours does not, rounds within other kernels, and multiplies
        # routed experts in 8 bits too.
        theirs = replace(machines, measured=(*machines.measured, ("paired", PAIRED), ("rounding", 0.0), ("eight", 1.0)))
        as_run = judge(load(ROOT / "examples" / f"{name}.toml", published.settings), theirs)
        found.append(Row(name, published, run, machines, as_run, judge(run, machines)))
    return found


def page(found: list[Row]) -> str:
    titles = (
        "run", "devices", "tokens", "step published", "step predicted (P10–P90)", "days published", "days predicted", "hours published",
        "hours predicted", "price of published hours", "price predicted",
        "days in Phalanx, with what fits", "its GiB of the fullest rank",
    )  # fmt: skip
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *(row.cells() for row in found)))
    notes = "\n".join(f"- **{row.published.title}.** {row.published.said} {row.published.note}".rstrip() for row in found)
    return f"""# The cost of scale

Six runs of the past, each a run file in [examples](../examples) with its layout: what was published beside what the equations predict
for the same layout, with the catalogue's machines and the constants of plans ([planner-accuracy.md](planner-accuracy.md) tells where they
are from and how sure they are; some of these steps are among those that they were fitted on).

{table}

Predicted days and hours include failures and saving as Phalanx handles them; published ones include whatever happened, or are computed
from the published step where no hours were. Prices are the catalogue's for an hour of a device (`phalanx clusters`), today's and not those
of the time. Some of these runs kept less in memory than Phalanx does, whose residual stream is fp32: the last two columns are what the run
file takes here, with recomputation and micro-batch filled in by the plan.

{notes}

This page and the figures at the head of the run files are made by `make docs`.
"""


def headed(text: str, row: Row) -> str:
    """A run file with its figures between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"examples/{row.name}.toml has lost its marks"
    lines = [*row.published_lines(), *row.predicted_lines()]
    # What belongs to a line is set in under it.
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
