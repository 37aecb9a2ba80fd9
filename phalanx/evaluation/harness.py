"""The adapter for lm-evaluation-harness (extra `harness`): its tasks ask, a model of ours answers.

    from phalanx.evaluation.harness import PhalanxLM
    lm_eval.simple_evaluate(model=PhalanxLM("runs/mine"), tasks=["hellaswag"])

or `python -m phalanx.evaluation.harness --model phalanx --model_args path=runs/mine --tasks hellaswag`, which is the harness's
own command with the name "phalanx" known to it. The class exists once the package does: it is made when first asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.data.chat import ChatTemplate
from phalanx.data.tokenizer import Tokenizer
from phalanx.evaluation.instruments import scorer
from phalanx.evaluation.open_model import open_model
from phalanx.evaluation.score import Request, Scorer
from phalanx.models.sampling import Sampling, generate
from phalanx.spec.errors import PhalanxError, RunError

if TYPE_CHECKING:
    PhalanxLM: type[Any]

_MOST_GENERATED = 256  # tokens, where a task does not say: the harness's own default


def __getattr__(name: str) -> Any:
    if name == "PhalanxLM":
        return _adapter()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _adapter() -> type[Any]:
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise RunError(
            [f"lm-evaluation-harness cannot be imported ({error}): install it with pip install 'phalanx[harness]'."]
        ) from None

    @register_model("phalanx")
    class PhalanxLM(LM):
        """A run directory, a checkpoint or a Hugging Face folder as a model of the harness."""

        def __init__(self, path: str, batch_size: int | str = 8, max_batch_size: int = 64, device: str | None = None):
            super().__init__()
            # "auto" has no meaning here, since nothing is tried out.
            batch = int(batch_size) if str(batch_size).isdigit() else min(8, max_batch_size)
            # The harness says "cuda" where nobody has said anything.
            here = device if torch.cuda.is_available() or not str(device).startswith("cuda") else None
            self._opened = open_model(Path(path), here)
            self._scorer = scorer(self._opened, batch)
            self.batch_size = batch

        @property
        def tokenizer_name(self) -> str:
            return self._opened.tokenizer.name.replace("/", "__")

        @property
        def device(self) -> Any:
            return self._scorer.device

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            asked = [self._scorer.encode(*request.args) for request in requests]
            found = [(score.logprob, score.greedy) for score in self._scorer.scores(asked)]
            self._remember("loglikelihood", requests, found)
            return found

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            found = rolling(self._scorer, [request.args[0] for request in requests])
            self._remember("loglikelihood_rolling", requests, found)
            return found

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            found = [until(self._scorer, *request.args) for request in requests]
            self._remember("generate_until", requests, found)
            return found

        def chat_template(self, chat_template: bool | str = False) -> str:
            return self._opened.tokenizer.chat_template or ""

        def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return chat(self._opened.tokenizer, chat_history, prompt=add_generation_prompt)

        def _remember(self, kind: str, requests: Sequence[Any], found: Sequence[Any]) -> None:
            for request, answer in zip(requests, found, strict=True):
                self.cache_hook.add_partial(kind, request.args, answer)

    return PhalanxLM


def rolling(judge: Scorer, texts: Sequence[str]) -> list[float]:
    """Log-likelihood of each whole text, whatever its length."""
    asked: list[Request] = []
    owners: list[int] = []
    for number, text in enumerate(texts):
        windows = judge.rolling(text)
        asked += windows
        owners += [number] * len(windows)
    sums = [0.0] * len(texts)
    for owner, score in zip(owners, judge.scores(asked), strict=True):
        sums[owner] += score.logprob
    return sums


def until(judge: Scorer, context: str, options: dict[str, Any]) -> str:
    """Text that goes on from the context, up to the first of the stop texts, which is left out."""
    given = options.get("until") or []
    stops = [stop for stop in ([given] if isinstance(given, str) else given) if stop]
    most = int(options.get("max_gen_toks", options.get("max_tokens", _MOST_GENERATED)))
    if not 0 < most < judge.context:
        raise RunError(
            [
                f"max_gen_toks = {most} is not between 1 and {judge.context - 1}: the model's context holds {judge.context} tokens."
            ]
        )
    temperature = float(options.get("temperature", 0.0)) if options.get("do_sample", "temperature" in options) else 0.0
    sampling = Sampling(temperature=temperature, top_k=options.get("top_k"), top_p=float(options.get("top_p", 1.0)))
    prompt = judge.prompt(context)[most - judge.context :]
    made: list[int] = []
    text = ""
    for token in generate(judge.model, prompt, most, judge.tokenizer.end, sampling):
        if token == judge.tokenizer.end:
            break
        made.append(token)
        text = judge.tokenizer.decode(made)  # all of them: a character may need several
        if any(stop in text for stop in stops):
            break
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def chat(tokenizer: Tokenizer, messages: Sequence[dict[str, str]], *, prompt: bool) -> str:
    """A conversation as the tokenizer's own template writes it."""
    if tokenizer.chat_template is None:
        raise RunError([f'The tokenizer "{tokenizer.name}" has no chat template: leave --apply_chat_template out.'])
    template = ChatTemplate(tokenizer.chat_template, f'the chat template of "{tokenizer.name}"', tokenizer.special)
    return template.render(messages, prompt=prompt).text


def main() -> None:
    """The harness's own command line, with our models in it."""
    try:
        _adapter()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except PhalanxError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
