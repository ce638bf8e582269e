"""Cases and network outputs small enough to score by hand."""

import math

import torch

from monai_saliency.cases import Case

FLAT = Case("ct_7", torch.zeros(1, 2, 3))
#: of three classes
LOGITS = torch.tensor([[0.0, math.log(3.0), -1.0]])
#: two channels on FLAT: channel 1 wins at three voxels
SEGMENTATION = torch.tensor([[[[1.0, 0.0, 0.0], [4.0, 2.0, 0.0]], [[0.0, 2.0, 4.0], [0.0, 0.0, 6.0]]]])
#: FLAT with a label map of two organs, the values 1 and 4
LABELLED = Case("ct_7", FLAT.image, labels=torch.tensor([[[0, 1, 0], [4, 4, 1]]]))
