from __future__ import annotations

from commands import InProcess

from phalanx.spec.model import PRESETS


def test_models_are_listed_with_what_they_cost(here: InProcess) -> None:
    ended = here("models", "--json")
    rows = {row["name"]: row for row in ended.json["models"]}
    assert rows.keys() == PRESETS.keys()
    mixtral = rows["mixtral-8x7b"]
    assert mixtral == {
        "name": "mixtral-8x7b",
        "parameters": 46_702_792_704,
        "active": 12_879_925_248,
        "layers": 32,
        "dim": 4096,
        "context": 32768,
        "vocab": 32000,
        "flops_per_token": PRESETS["mixtral-8x7b"].flops_per_token(32768),
        "state_bytes": 16 * 46_702_792_704,
    }
    # Six per active weight but the embedding's, 12 · layers · width · sequence of attention; norms multiply nothing.
    matrices = mixtral["active"] - 32000 * 4096 - 65 * 4096
    assert mixtral["flops_per_token"] == 6 * matrices + 12 * 32 * 4096 * 32768
    line = next(line for line in ended.err.splitlines() if "mixtral-8x7b" in line)
    for words in ("46.7B", "12.9B", " 32 ", "4,096", "32,768", "32,000"):
        assert words in line.replace(" B", "B"), line
