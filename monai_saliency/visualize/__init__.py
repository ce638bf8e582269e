"""Pictures of maps, drawn with matplotlib.

============  =======================================================
module        picture
============  =======================================================
``pictures``  maps over their scan: the three planes through the peak
============  =======================================================
"""

from monai_saliency.visualize.pictures import plot_saliency

__all__ = ["plot_saliency"]
