"""The adapter for lm-evaluation-harness (extra `harness`).

    from phalanx.evaluation.harness import PhalanxLM
    lm_eval.simple_evaluate(model=PhalanxLM("runs/mine"), tasks=["hellaswag"])

or `python -m phalanx.evaluation.harness --model phalanx --model_args path=runs/mine --tasks hellaswag`, which is the harness's own
command with the model "phalanx" registered. The class is created at its first use, because its base class is in the extra.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx import accelerator
from phalanx.data.chat import ChatTemplate
from phalanx.data.tokenizer import Tokenizer
from phalanx.evaluation.open_model import open_model
from phalanx.evaluation.open_model import scorer as scorer_of
from phalanx.evaluation.score import Scorer
from phalanx.models.sampling import Sampling, generate
from phalanx.spec.errors import PhalanxError, RunError

if TYPE_CHECKING:
    PhalanxLM: type[Any]

T = TypeVar("T")
_MAX_GENERATED = 256  # tokens, if a task does not say: the harness's own default


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
            f"lm-evaluation-harness cannot be imported ({error}): install it with pip install 'phalanx[harness]'."
        ) from None

    @register_model("phalanx")
    class PhalanxLM(LM):
        """A run directory, a checkpoint or a Hugging Face folder as a model of the harness."""

        def __init__(self, path: str, batch_size: int | str = 8, max_batch_size: int = 64, device: str | None = None):
            super().__init__()
            # "auto" means the default: batch sizes are not searched.
            batch = int(batch_size) if str(batch_size).isdigit() else min(8, max_batch_size)
            # The harness passes "cuda" if no device was given.
            here = device if accelerator.of("cuda").available() or not str(device).startswith("cuda") else None
            self._opened = open_model(Path(path), here)
            self._scorer = scorer_of(self._opened, batch)
            self.batch_size = batch

        @property
        def tokenizer_name(self) -> str:
            return self._opened.tokenizer.name.replace("/", "__")

        @property
        def device(self) -> Any:
            return self._scorer.device

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            encoded = [self._scorer.encode(*request.args) for request in requests]
            answers = [(score.logprob, score.greedy) for score in self._scorer.scores(encoded)]
            return self._cached("loglikelihood", requests, answers)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            answers = rolling(self._scorer, [request.args[0] for request in requests])
            return self._cached("loglikelihood_rolling", requests, answers)

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            answers = [until(self._scorer, *request.args, stop_tokens=self._opened.stops) for request in requests]
            return self._cached("generate_until", requests, answers)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return self._opened.tokenizer.chat_template or ""

        def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return chat(self._opened.tokenizer, chat_history, prompt=add_generation_prompt)

        def _cached(self, kind: str, requests: Sequence[Any], answers: list[T]) -> list[T]:
            for request, answer in zip(requests, answers, strict=True):
                self.cache_hook.add_partial(kind, request.args, answer)
            return answers

    return PhalanxLM


def rolling(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """Log-likelihood of each whole text, whatever its length."""
    windows = [scorer.rolling(text) for text in texts]
    scores = iter(scorer.scores([request for requests in windows for request in requests]))
    return [sum((next(scores).logprob for _ in requests), 0.0) for requests in windows]


def until(scorer: Scorer, context: str, options: dict[str, Any], *, stop_tokens: frozenset[int] = frozenset()) -> str:
    """Generated text after the context, up to and without the first stop text. `stop_tokens` end it, too, as the end token does."""
    given = options.get("until") or []
    stops = [stop for stop in ([given] if isinstance(given, str) else given) if stop]
    most = int(options.get("max_gen_toks", options.get("max_tokens", _MAX_GENERATED)))
    if not 0 < most < scorer.context:
        raise RunError(
            f"max_gen_toks = {most} is not between 1 and {scorer.context - 1}: the model's context holds {scorer.context} tokens."
        )
    temperature = float(options.get("temperature", 0.0)) if options.get("do_sample", "temperature" in options) else 0.0
    sampling = Sampling(temperature=temperature, top_k=options.get("top_k"), top_p=float(options.get("top_p", 1.0)))
    prompt = scorer.prompt(context)[most - scorer.context :]
    tokens: list[int] = []
    text = ""
    for token in generate(scorer.model, prompt, most, scorer.tokenizer.end, sampling):
        if token == scorer.tokenizer.end or token in stop_tokens:
            break
        tokens.append(token)
        text = scorer.tokenizer.decode(tokens)  # all of them: a character may consist of several tokens
        if any(stop in text for stop in stops):
            break
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def chat(tokenizer: Tokenizer, messages: Sequence[dict[str, str]], *, prompt: bool) -> str:
    """A conversation as text, by the tokenizer's chat template."""
    if tokenizer.chat_template is None:
        raise RunError(f'The tokenizer "{tokenizer.name}" has no chat template: remove --apply_chat_template.')
    template = ChatTemplate(tokenizer.chat_template, f'the chat template of "{tokenizer.name}"', tokenizer.special)
    return template.render(messages, prompt=prompt).text


def main() -> None:
    """The harness's own command line, with the model "phalanx" registered."""
    try:
        _adapter()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except PhalanxError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
