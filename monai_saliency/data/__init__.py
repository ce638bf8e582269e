"""Cohorts of scans: find, preprocess, cache and load them."""

from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.data.cohort import find_cases
from monai_saliency.data.loader import CohortLoader
from monai_saliency.data.saliency_dataset import SaliencyDataset

__all__ = [
    "CachedDataset",
    "CohortLoader",
    "SaliencyDataset",
    "find_cases",
]
