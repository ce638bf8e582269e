"""Explaining inside a MONAI evaluator. Needs the extra ``bundle``."""

from monai_saliency.handlers.mlflow import Tracker
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.handlers.summary import Summary

__all__ = ["SaliencyHandler", "Summary", "Tracker"]
