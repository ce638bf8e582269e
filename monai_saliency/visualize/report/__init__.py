"""A report of a cohort that opens from disk: a page for all cases, and one with the scan and its maps for each.

==================  ===================================================================
module              what it holds
==================  ===================================================================
``build``           writing the report of a run: pages, pictures, ``cohort_regions.csv``
``cases``           what an output folder holds of each case
``kept_scan``       the scan that a run keeps for the report, in ``views/``
``shown``           what a case's page shows: volumes, and small pictures
``plots``           the plots of a cohort, and the curves of a case
``regions``         the values of regions: of a case as bars, of a cohort as a matrix
``compared``        the report of several runs: how far they agree
``methods``         the page of methods compared on one network
``templates/``      the Jinja2 templates of the pages
``assets/``         their scripts and style
``vendored/``       NiiVue, the viewer of volumes, with its licence
==================  ===================================================================
"""

from monai_saliency.visualize.report.build import try_report, write_report
from monai_saliency.visualize.report.compared import write_comparison
from monai_saliency.visualize.report.kept_scan import KeptScan

__all__ = ["KeptScan", "try_report", "write_comparison", "write_report"]
