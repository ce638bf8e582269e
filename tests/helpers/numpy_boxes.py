"""Black boxes in plain NumPy, double precision and nonlinear, for us and for xaitk-saliency alike."""

import numpy as np
import torch

CLASSES, BOXES = 4, 3


class BlackBox:
    """Numbers of images ``(C, *spatial)``.

    Args:
        shape: of an image.
        outputs: how many numbers.
        seed: of the weights.
    """

    def __init__(self, shape: tuple[int, ...], outputs: int = CLASSES, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.first = rng.normal(size=(6, *shape)) / np.sqrt(np.prod(shape))
        self.second = 3 * rng.normal(size=(outputs, 6))
        self.extent = max(shape[1:])

    def __call__(self, image: np.ndarray) -> np.ndarray:
        return self.second @ np.tanh(np.tensordot(self.first, image, axes=image.ndim))

    def odds(self, image: np.ndarray) -> np.ndarray:
        """Probabilities of the classes."""
        odds = np.exp(self(image) - self(image).max())
        return odds / odds.sum()

    def boxes(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Corners ``(BOXES, 2 * axes)``, whole voxels, the lower ones first, and scores ``(BOXES, CLASSES)``."""
        dims = image.ndim - 1
        numbers = 1 / (1 + np.exp(-self(image).reshape(BOXES, 2 * dims + CLASSES)))
        low = np.round(numbers[:, :dims] * self.extent / 3)
        high = low + 3 + np.round(numbers[:, dims : 2 * dims] * self.extent / 2)
        return np.concatenate([low, high], axis=1), numbers[:, 2 * dims :]

    @staticmethod
    def box_outputs(dims: int) -> int:
        """The number of outputs that :meth:`boxes` needs."""
        return BOXES * (2 * dims + CLASSES)

    def classify(self, batch: torch.Tensor) -> torch.Tensor:
        """For us: probabilities."""
        return torch.from_numpy(np.stack([self.odds(image) for image in batch.numpy()]))

    def describe(self, batch: torch.Tensor) -> torch.Tensor:
        """For us: embeddings."""
        return torch.from_numpy(np.stack([self(image) for image in batch.numpy()]))

    def detect(self, batch: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """For us: boxes that end behind their last voxel."""
        found = []
        for image in batch.numpy():
            corners, scores = self.boxes(image)
            corners[:, corners.shape[1] // 2 :] += 1
            found.append(
                {
                    "boxes": torch.from_numpy(corners),
                    "labels": torch.from_numpy(scores.argmax(axis=1)),
                    "labels_scores": torch.from_numpy(scores),
                }
            )
        return found
