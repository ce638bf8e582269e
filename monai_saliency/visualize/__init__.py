"""Pictures of maps, drawn with matplotlib, and reports of cohorts.

============  ===================================================================
module        what it holds
============  ===================================================================
``pictures``  maps over their scan: the three planes through the peak
``legend``    what their colours mean: the scale, and what is worth colouring
``report/``   pages of a cohort that open from disk
============  ===================================================================
"""

from monai_saliency.visualize.legend import Legend
from monai_saliency.visualize.pictures import plot_saliency
from monai_saliency.visualize.report import write_comparison, write_report

__all__ = ["Legend", "plot_saliency", "write_comparison", "write_report"]
