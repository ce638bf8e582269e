from .check import CheckScanD, CheckScand, CheckScanDict
from .saliency import Saliency, SaliencyD, Saliencyd, SaliencyDict
from .save import SaveSaliencyD, SaveSaliencyd, SaveSaliencyDict

__all__ = [
    "CheckScanD",
    "CheckScanDict",
    "CheckScand",
    "Saliency",
    "SaliencyD",
    "SaliencyDict",
    "Saliencyd",
    "SaveSaliencyD",
    "SaveSaliencyDict",
    "SaveSaliencyd",
]
