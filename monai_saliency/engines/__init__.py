"""The evaluator, and the run of a cohort. Needs the extra ``bundle``."""

from monai_saliency.engines.evaluator import CohortEvaluator

__all__ = ["CohortEvaluator"]
