"""The adapter for lm-evaluation-harness: its pieces by themselves, and where the package is there, a task of its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.tiny import CONTEXT, spec
from ranks import ALONE, tiny_run, tiny_trainer

from phalanx.data.tokenizer import ByteTokenizer
from phalanx.evaluation import harness
from phalanx.evaluation.choices import BadRecords, choose, read_questions
from phalanx.evaluation.harness import chat, rolling, until
from phalanx.evaluation.open_model import open_model, scorer
from phalanx.evaluation.score import Scorer
from phalanx.models.init import build, materialize
from phalanx.models.sampling import Sampling, generate
from phalanx.parallel.mesh import connect
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError

there = importlib.util.find_spec("lm_eval") is not None
with_harness = pytest.mark.skipif(not there, reason="lm_eval is not installed: pip install 'phalanx[harness]'")


@pytest.fixture(scope="module")
def judge() -> Scorer:
    model = materialize(build(spec(257)), 0, torch.device("cpu")).eval()
    return Scorer(model, ByteTokenizer(), context=CONTEXT, batch=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint of a few steps."""
    path = tmp_path_factory.mktemp("run")
    settings = tiny_run("train.steps=5", "model.context=256")
    trainer = tiny_trainer(connect(ALONE, "cpu", 60.0), settings, path / "checkpoints")
    for _ in trainer.events():
        pass
    (path / "run.toml").write_text(dump(settings))
    return path


@pytest.mark.skipif(there, reason="lm_eval is installed")
def test_without_the_package() -> None:
    with pytest.raises(RunError, match=r"pip install 'phalanx\[harness\]'"):
        _ = harness.PhalanxLM
    with pytest.raises(RunError, match="harness"):
        from phalanx.evaluation.harness import PhalanxLM  # noqa: F401


def test_rolling_is_the_sum_over_all_tokens(judge: Scorer) -> None:
    texts = ["short", "x" * (2 * CONTEXT + 9), "", "another one"]
    got = rolling(judge, texts)
    for text, value in zip(texts, got, strict=True):
        expected = 0.0
        ids = [256, *text.encode()]
        for begin in range(0, len(ids) - 1, CONTEXT):
            end = min(begin + CONTEXT, len(ids) - 1)
            first = max(0, end - CONTEXT)
            with torch.no_grad():
                logits = judge.model(torch.tensor([ids[first:end]]), torch.arange(end - first)[None])[0].log_softmax(-1)
            expected += sum(float(logits[i - first, ids[i + 1]]) for i in range(begin, end))
        assert value == pytest.approx(expected, abs=1e-3)


def test_generation_stops(judge: Scorer) -> None:
    whole = until(judge, "The ", {"max_gen_toks": 30})
    tokens = list(generate(judge.model, list(b"The "), 30, 256, Sampling(temperature=0)))
    assert whole == judge.tokenizer.decode(tokens), "greedy where nothing else is said"
    middle = whole[len(whole) // 2]
    for stop in (middle, [middle], ["never in it", middle]):
        assert until(judge, "The ", {"until": stop, "max_gen_toks": 30}) == whole[: whole.index(middle)]
    assert until(judge, "x" * 500, {"max_gen_toks": 4})  # the beginning of a long context is left out
    drawn = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 30}
    assert until(judge, "The ", drawn) == until(judge, "The ", drawn) != whole
    with pytest.raises(RunError, match="max_gen_toks = 64"):
        until(judge, "The ", {"max_gen_toks": CONTEXT})


def test_conversations(judge: Scorer) -> None:
    words = ByteTokenizer()
    messages = [{"role": "user", "content": "Hi?"}]
    with pytest.raises(RunError, match="has no chat template"):
        chat(words, messages, prompt=True)
    words.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
    )
    assert chat(words, messages, prompt=True) == "<user>Hi?<me>"
    assert chat(words, messages, prompt=False) == "<user>Hi?"


@with_harness
def test_a_task_of_the_harness(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it counts is what `phalanx eval --choices` counts."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    questions = tmp_path / "questions.jsonl"
    records = [
        {"question": f"Which of these is {i}?", "choices": ["one", f"a number: {i}", "x" * (i % 5 + 1)], "answer": i % 3}
        for i in range(30)
    ]
    questions.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "task.yaml").write_text(
        f"task: tiny\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {questions}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    model: Any = harness.PhalanxLM(str(run), batch_size=4)
    tasks = TaskManager(include_path=str(tmp_path))
    found = lm_eval.simple_evaluate(model=model, tasks=["tiny"], task_manager=tasks, bootstrap_iters=0)["results"]["tiny"]
    bad = BadRecords(questions, 0)
    ours = choose(scorer(open_model(run, "cpu"), 4), read_questions(questions, bad), bad)
    assert found["acc,none"] == pytest.approx(ours.accuracy)
    assert found["acc_norm,none"] == pytest.approx(ours.accuracy_normalized)
    assert 0 < ours.accuracy < 1


@with_harness
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_windows_are_those_of_the_harness(judge: Scorer, length: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    text = "".join(chr(97 + i % 26) for i in range(length))
    theirs = [
        make_disjoint_window(pair)
        for pair in get_rolling_token_windows(list(text.encode()), prefix_token=256, max_seq_len=CONTEXT, context_len=1)
    ]
    assert [(list(a), list(b)) for a, b in judge.rolling(text)] == theirs


@with_harness
def test_pairs_are_those_of_the_harness(judge: Scorer) -> None:
    from lm_eval.api.model import TemplateLM

    class Theirs(TemplateLM):
        eot_token_id = 256

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return list(string.encode())

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> Any: ...
        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any: ...
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any: ...

    for context, continuation in [("a b", " c"), ("a b ", "c"), ("a\n\n", "c d"), ("é ", "ü")]:
        assert tuple(judge.encode(context, continuation)) == Theirs()._encode_pair(context, continuation)
