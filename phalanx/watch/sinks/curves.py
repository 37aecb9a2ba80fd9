"""The values of records that TensorBoard, Weights & Biases and MLflow draw as curves."""

from __future__ import annotations

from phalanx.events.records import Evaluated, Event, Step


def curves(event: Event) -> tuple[int, dict[str, float]]:
    """The step of a record, and its values by the names of their curves; (0, {}) for a record without curves."""
    match event:
        case Step():
            values = {
                "train/loss": event.loss,
                "train/grad_norm": event.grad_norm,
                "train/learning_rate": event.learning_rate,
                "speed/tokens_per_second": event.tokens_per_second,
                "speed/flops_per_second": event.flops_per_second,
                "memory/bytes": float(event.memory),
            }
            optional = {"speed/mfu": event.mfu, "train/expert_load": event.expert_load}
            return event.step, values | {name: value for name, value in optional.items() if value is not None}
        case Evaluated():
            each = {f"eval/{name}/loss": source["loss"] for name, source in event.sources.items()}
            return event.step, {"eval/loss": event.loss} | (each if len(each) > 1 else {})
        case _:
            return 0, {}
