"""Text that an opened model continues, as one value. Called by `px.generate`."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.evaluation.open_model import Opened
from phalanx.models.sampling import Sampling, generate


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Text sampled from a model. `str()` of it is the prompt with its continuation."""

    prompt: str
    text: str
    """The continuation."""
    tokens: tuple[int, ...]
    """Its token ids."""
    checkpoint: str
    """The checkpoint or folder that was used."""
    step: int | None
    """Step of the checkpoint; None: a Hugging Face folder."""
    damaged: tuple[str, ...]
    """Newer checkpoints that were skipped because they are damaged, and why."""

    def __str__(self) -> str:
        return self.prompt + self.text


def sample_text(opened: Opened, prompt: str, tokens: int, sampling: Sampling) -> Generation:
    """Up to so many tokens after the prompt. Without a prompt, the model continues the end of a previous document."""
    tokenizer = opened.tokenizer
    start = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    sampled: list[int] = []
    for token in generate(opened.model, start, tokens, -1, sampling):
        sampled.append(token)
        if token in opened.stops:
            break
    return Generation(
        prompt=prompt,
        text=tokenizer.decode(sampled),
        tokens=tuple(sampled),
        checkpoint=str(opened.path),
        step=opened.step,
        damaged=tuple(map(str, opened.damaged)),
    )
