"""Pictures of maps, drawn with matplotlib.

============  ===================================================================
module        what it holds
============  ===================================================================
``pictures``  maps over their scan: the three planes through the peak
``legend``    what their colours mean: the scale, and what is worth colouring
============  ===================================================================
"""

from monai_saliency.visualize.legend import Legend
from monai_saliency.visualize.pictures import plot_saliency

__all__ = ["Legend", "plot_saliency"]
