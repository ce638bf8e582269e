"""What a run says of a case: the words above its picture, and its line."""

from __future__ import annotations

from monai_saliency.inferers.explanation import Explanation
from monai_saliency.targets.base import label_name
from monai_saliency.visualize.legend import score_words

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
    scores, quantity, without = [], target.quantity(), explanation.without_peak.tolist()
    for label, score, left in zip(target.labels, explanation.reference_scores.tolist(), without, strict=True):
        figures = [f"{quantity.reported(each):.3f}" for each in (score, left)]
        scores.append(f"{label_name(label)} {score_words(quantity.unit, *figures)}")
    words.append(f"explained: {'; '.join(scores)}")
    lines = [explanation.name, ", ".join(words)]
    if explanation.fill_problem:
        lines.append(explanation.fill_problem)
    return "\n".join(lines)
