"""MONAI transforms around saliency, as array and dictionary transforms.

==============  ===================================================================================
module          transforms
==============  ===================================================================================
``check``       :class:`CheckScand`: refuse scans that cannot be explained
``dicom``       :func:`save_parametric_map`: write a map as DICOM, for a DICOM series
``label_maps``  :class:`LoadRegionsd`, :class:`SaveRegionsd`: label maps, and the table of their regions
``saliency``    :class:`Saliency`, :class:`Saliencyd`: explain an image
``nnunet``      :class:`NNUNetPreprocessd`: nnU-Net's own preprocessing, with the way back
``save``        :class:`SaveSaliencyd`: write maps on the scan's own grid
``save_dicom``  :class:`SaveDicomd`: write the maps of DICOM series as DICOM, with
                :func:`save_secondary_capture`, pictures for archives
``writers``     :func:`case_writers`: the list of all that is written for a case
==============  ===================================================================================
"""

from .check import CheckScanD, CheckScand, CheckScanDict
from .dicom import save_parametric_map
from .label_maps import LoadRegionsD, LoadRegionsd, LoadRegionsDict, SaveRegionsD, SaveRegionsd, SaveRegionsDict
from .nnunet import NNUNetPreprocessD, NNUNetPreprocessd, NNUNetPreprocessDict
from .saliency import Saliency, SaliencyD, Saliencyd, SaliencyDict
from .save import SaveSaliencyD, SaveSaliencyd, SaveSaliencyDict
from .save_dicom import SaveDicomD, SaveDicomd, SaveDicomDict
from .secondary_capture import save_secondary_capture
from .writers import case_writers

__all__ = [
    "CheckScanD",
    "CheckScanDict",
    "CheckScand",
    "LoadRegionsD",
    "LoadRegionsDict",
    "LoadRegionsd",
    "NNUNetPreprocessD",
    "NNUNetPreprocessDict",
    "NNUNetPreprocessd",
    "Saliency",
    "SaliencyD",
    "SaliencyDict",
    "Saliencyd",
    "SaveDicomD",
    "SaveDicomDict",
    "SaveDicomd",
    "SaveRegionsD",
    "SaveRegionsDict",
    "SaveRegionsd",
    "SaveSaliencyD",
    "SaveSaliencyDict",
    "SaveSaliencyd",
    "case_writers",
    "save_parametric_map",
    "save_secondary_capture",
]
