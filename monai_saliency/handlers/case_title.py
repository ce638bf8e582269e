"""What a run says of a case: the words above its picture, and its line."""

from __future__ import annotations

from monai_saliency.inferers.explanation import Explanation
from monai_saliency.targets.base import Quantity, label_name

__all__ = ["case_title"]


def case_title(explanation: Explanation) -> str:
    """What is predicted and explained of a case, in two lines, and in a third one what is wrong with its fill."""
    target = explanation.target
    described = target.describe()
    words = []
    if "prediction" in described:
        words.append(f"predicted {described['prediction']}")
        if "probability" in described:
            words[-1] += f" ({described['probability']:.3f})"
    scores, quantity = [], target.quantity()
    for label, score in zip(target.labels, explanation.reference_scores.tolist(), strict=True):
        scores.append(f"{label_name(label)} scores {_figure(quantity, score)}")
    words.append(f"explained: {', '.join(scores)}")
    lines = [explanation.name, ", ".join(words)]
    if explanation.fill_problem:
        lines.append(explanation.fill_problem)
    return "\n".join(lines)


def _figure(quantity: Quantity, score: float) -> str:
    """The score of a title; of log-odds with their probability."""
    reported = f"{quantity.reported(score):.3f}"
    return f"{reported} (log-odds {score:.2f})" if quantity.unit == "log-odds" else reported
