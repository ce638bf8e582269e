"""Pictures of maps."""

from monai_saliency.visualize.pictures import plot_saliency

__all__ = ["plot_saliency"]
