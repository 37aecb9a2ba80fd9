"""Samples of the live model while it trains (train.sample_every), on any layout: all ranks compute the logits of every token together and
draw the same token. Nothing of the training changes: neither state nor the random numbers of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from phalanx.data.chat_turns import SamplePrompt, sample_prompts
from phalanx.data.tokenizer import Tokenizer
from phalanx.events.records import Sampled
from phalanx.models.sampling import Sampling, draw
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.evaluate import StopExchange
from phalanx.training.live_logits import length_unit, live_logits
from phalanx.training.step import Stepper
from phalanx.training.step_totals import StopSignal


class Sampler:
    """Generates the samples of a run. There is no KV cache: every token takes a forward of the whole text, as ranks share it in training."""

    def __init__(self, run: Run, plan: Plan, tokenizer: Tokenizer):
        self._run, self._layout, self._tokenizer = run, plan.layout, tokenizer
        self._prompts: list[SamplePrompt] | None = None

    def samples(
        self, stepper: Stepper, step: int, stop_signal: StopSignal, on_forward: Callable[[], None]
    ) -> Iterator[Sampled]:
        """A sample for each prompt; fewer if a rank was asked to stop. `on_forward` is called before every forward."""
        if self._prompts is None:
            self._prompts = sample_prompts(self._run, self._tokenizer)
        exchange = StopExchange(stepper.sharded.mesh, stop_signal)
        for prompt in self._prompts:
            started = time.perf_counter()
            generated: list[int] = []
            for token in self._tokens(prompt, stepper, on_forward):
                generated.append(token)
                if exchange.stops():
                    return
            text = self._tokenizer.decode([token for token in generated if token not in prompt.ends])
            seconds = time.perf_counter() - started
            yield Sampled(step=step, prompt=prompt.text, text=text, tokens=len(generated), seconds=seconds)
        exchange.wait()

    def _tokens(self, prompt: SamplePrompt, stepper: Stepper, on_forward: Callable[[], None]) -> Iterator[int]:
        train, unit = self._run.train, length_unit(self._run, self._layout)
        sampling = Sampling(temperature=train.sample_temperature, seed=train.seed)
        generator = torch.Generator().manual_seed(sampling.seed)  # of its own, on the host: the same on every rank
        text = list(prompt.ids)
        for _ in range(min(train.sample_tokens, train.sequence_length - len(text))):
            on_forward()
            # The text is padded to a length that the ranks can divide; no token sees the padding behind it.
            tokens_S = np.full(-(-len(text) // unit) * unit, self._tokenizer.end)
            tokens_S[: len(text)] = text
            logits_KV = live_logits(stepper, self._run, self._layout, tokens_S, np.array([len(text) - 1]))
            token = draw(logits_KV[0].cpu(), sampling, generator)
            yield token
            if token in prompt.ends:
                return
            text.append(token)
