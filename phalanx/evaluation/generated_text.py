"""Text that an opened model continues, token by token or as one value. Called by `px.generate`, `phalanx generate` and conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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


def sample_tokens(
    opened: Opened, prompt: Sequence[int], tokens: int, sampling: Sampling, stops: Collection[int | None]
) -> Iterator[int]:
    """Up to so many tokens after the prompt. One of `stops` is the last."""
    for token in generate(opened.model, prompt, tokens, -1, sampling):
        yield token
        if token in stops:
            return


def sample_text(
    opened: Opened, prompt: str, tokens: int, sampling: Sampling, on_text: Callable[[str], object] = lambda piece: None
) -> Generation:
    """Up to so many tokens after the prompt. Without a prompt, the model continues the end of a previous document. `on_text` receives the
    text piece by piece."""
    tokenizer = opened.tokenizer
    start = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    push = tokenizer.stream()
    sampled: list[int] = []
    for token in sample_tokens(opened, start, tokens, sampling, opened.stops):
        sampled.append(token)
        if token != tokenizer.end:
            on_text(push(token))
    return Generation(
        prompt=prompt,
        text=tokenizer.decode(sampled),
        tokens=tuple(sampled),
        checkpoint=str(opened.path),
        step=opened.step,
        damaged=tuple(map(str, opened.damaged)),
    )
