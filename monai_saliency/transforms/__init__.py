from .check import CheckScanD, CheckScand, CheckScanDict
from .label_maps import LoadRegionsD, LoadRegionsd, LoadRegionsDict, SaveRegionsD, SaveRegionsd, SaveRegionsDict
from .saliency import Saliency, SaliencyD, Saliencyd, SaliencyDict
from .save import SaveSaliencyD, SaveSaliencyd, SaveSaliencyDict

__all__ = [
    "CheckScanD",
    "CheckScanDict",
    "CheckScand",
    "LoadRegionsD",
    "LoadRegionsDict",
    "LoadRegionsd",
    "Saliency",
    "SaliencyD",
    "SaliencyDict",
    "Saliencyd",
    "SaveRegionsD",
    "SaveRegionsDict",
    "SaveRegionsd",
    "SaveSaliencyD",
    "SaveSaliencyDict",
    "SaveSaliencyd",
]
