"""What every message to a person has to be."""

from __future__ import annotations

import re


def assert_one_sentence(problem: str) -> None:
    assert "\n" not in problem
    assert problem[-1] in ".?"
    assert not re.search(r"[.?!] +[A-Z]", problem), "a second sentence"
