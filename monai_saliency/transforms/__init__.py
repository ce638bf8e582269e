"""MONAI transforms around saliency.

==============  ===================================================================================
module          transforms
==============  ===================================================================================
``check``       :class:`CheckScand`: refuse scans that cannot be explained
``label_maps``  :class:`LoadRegionsd`: label maps on the image's grid
``saliency``    :class:`Saliency`, :class:`Saliencyd`: explain an image
``nnunet``      :class:`NNUNetPreprocessd`: nnU-Net's own preprocessing, with the way back
``save``        :class:`SaveSaliencyd`: write maps on the scan's own grid
``save_dicom``  :class:`SaveDicomd`: write the maps of DICOM series as DICOM, with
                :func:`save_parametric_map`, and for viewers without these
                :func:`save_segmentation` and :func:`save_secondary_capture`
``on_series``   a map on the grid of its DICOM series
``save_bids``   :class:`SaveBidsd`: write the maps of a BIDS dataset as a BIDS derivative
``regions``     :class:`SaveRegionsd`: tables of the regions that masks hide, and of the
                maps' means in the regions of label maps
``writers``     :func:`case_writers`: the list of all that is written for a case
==============  ===================================================================================
"""

from .check import CheckScand
from .label_maps import LoadRegionsd
from .nnunet import NNUNetPreprocessd
from .regions import SaveRegionsd
from .saliency import Saliency, Saliencyd
from .save import SaveSaliencyd
from .save_bids import SaveBidsd
from .save_dicom import SaveDicomd, save_parametric_map, save_secondary_capture, save_segmentation
from .writers import case_writers

__all__ = [
    "CheckScand",
    "LoadRegionsd",
    "NNUNetPreprocessd",
    "Saliency",
    "Saliencyd",
    "SaveBidsd",
    "SaveDicomd",
    "SaveRegionsd",
    "SaveSaliencyd",
    "case_writers",
    "save_parametric_map",
    "save_secondary_capture",
    "save_segmentation",
]
