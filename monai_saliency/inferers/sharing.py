"""Scores of one case from several workers, such as ranks or parts that were scored apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.ensemble_state import EnsembleState
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.row_check import RowsDepend
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.runtime import runtime_settings
from monai_saliency.storage.key import Unfingerprintable, fingerprint
from monai_saliency.utils.precision import chosen_arithmetic
from monai_saliency.utils.tensors import plain

# Scores of one image and network on two machines differ by less, relative to the largest of them, or by less than some
# roundings of a network in half precision.
_TOLERANCE, _ROUNDINGS = 1e-3, 20


def note_origin(states: Sequence[CaseState], deciding: Mapping[str, Any], network: Any, with_images: bool) -> None:
    """Note hashes of what decides the scores: settings, weights and images, but where two machines preprocess these."""
    given = {**deciding, "autocast or TF32": [*chosen_arithmetic(), runtime_settings(network)]}
    shared = {name: _hash(value) for name, value in given.items()}
    shared["the network"] = network_fingerprint(network, kept=True)
    for state in states:
        case = state.case
        labels = None if case.labels is None else plain(case.labels).cpu()
        held = plain(state.images.held).cpu()
        within = None if case.within is None else case.within.cpu()
        image = [plain(case.image).cpu(), held, labels, case.spacing, within] if with_images else None
        state.made_by = {**shared, "the image, label map, voxel sizes, `within` or held inputs": _hash(image)}


def _hash(value: Any) -> str | None:
    try:
        return fingerprint(value)
    except Unfingerprintable:
        return None


@dataclass(frozen=True)
class WorkerScores:
    """The scores that one worker has of a case, on the host."""

    name: str
    seen: torch.Tensor
    scores: torch.Tensor
    reference_scores: torch.Tensor
    num_forwards: int
    one_by_one: bool = False
    rounding: float = 0.0
    made_by: Mapping[str, str | None] = field(default_factory=dict)

    @staticmethod
    def of(state: CaseState) -> WorkerScores:
        """The scores of this worker."""
        search = state.search
        return WorkerScores(
            name=state.case.name,
            seen=search.seen,
            scores=search.scores.detach().cpu(),
            reference_scores=search.reference_scores.detach().cpu(),
            num_forwards=state.forwards_here,
            one_by_one=state.one_by_one,
            rounding=state.rounding,
            made_by={**state.made_by, "masks": repr(state.masks.key)},
        )

    def differences(self, other: WorkerScores) -> list[str]:
        """The differences to another worker, in words; empty if the scores belong together."""
        ours, theirs = self.made_by, other.made_by
        known = [name for name in ours if None not in (ours[name], theirs.get(name))]
        found = [name for name in known if ours[name] != theirs[name]]
        first, second = self.reference_scores.double(), other.reference_scores.double()
        if first.shape != second.shape:
            return [*found, f"the number of scores ({len(first)} and {len(second)})"]
        largest = float(first.nan_to_num(0, 0, 0).abs().max()) if len(first) else 0.0
        allowed = max(_TOLERANCE, _ROUNDINGS * self.rounding) * largest
        if not torch.allclose(first, second, rtol=0, atol=allowed, equal_nan=True):
            found.append(f"the score of the unperturbed image ({first.tolist()[:3]} and {second.tolist()[:3]})")
        return found


def take_scores(states: Sequence[CaseState], workers: Sequence[Sequence[WorkerScores]], me: int) -> None:
    """Give the cases the scores of all workers, after which they are the same to the bit for every worker."""
    for number, theirs in enumerate(workers):
        for ours, other in zip(workers[0], theirs, strict=False):
            if ours.one_by_one != other.one_by_one:
                raise RowsDepend(
                    other.name,
                    "its images went through the network one at a time for some of the workers that share its masks, "
                    f"and in batches for others (worker 0 and worker {number} differ)",
                )
    for index, state in enumerate(states):
        of_case, search = [scores[index] for scores in workers], state.search
        search.reference_scores = of_case[0].reference_scores.to(search.reference_scores)
        for worker in of_case:
            rows = worker.seen.nonzero().flatten().tolist()
            search.update(rows, worker.scores[rows])
        state.forwards_elsewhere = sum(worker.num_forwards for place, worker in enumerate(of_case) if place != me)


@torch.no_grad()
def merged(parts: Iterable[Sequence[CaseState]]) -> list[Explanation]:
    """The explanations of cases whose parts were scored apart, equal to the bit to cases scored in one go.

    Args:
        parts: what :meth:`~monai_saliency.PerturbationInferer.score` gave for each part of the same cases.

    Raises:
        ValueError: when the parts belong to different images, settings or networks.
        CaseError: when a part or a round is missing, or scores are NaN or infinite.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> from monai_saliency.sharding import Part
        >>> explain = ms.rise(16, target=ms.ClassScore([0], "none"), mask_batch_size=4)
        >>> images, network = torch.rand(1, 1, 8, 8), torch.nn.Flatten()
        >>> parts = [explain.score(images, network, part=Part(i, 2)) for i in range(2)]
        >>> bool((merged(parts)[0].saliency == explain(images, network)[0]).all())
        True
    """
    return [_whole(states).explanation() for states in zip(*parts, strict=True)]


def _whole(states: Sequence[Any]) -> CaseState | EnsembleState:
    """The first part of a case, with the scores of all."""
    if isinstance(states[0], EnsembleState):
        of_members = zip(*(state.members for state in states), strict=True)
        return EnsembleState([cast(CaseState, _whole(parts)) for parts in of_members])
    workers = [WorkerScores.of(state) for state in states]
    for other in workers:
        if found := workers[0].differences(other):
            raise ValueError(
                f"case {other.name}: its parts differ in {' and '.join(found)}, so their scores do not belong "
                "together: score all parts of the same image with the same settings and the same weights"
            )
    whole: CaseState = states[0]
    take_scores([whole], [[worker] for worker in workers], 0)
    whole.forwards_elsewhere = sum(state.num_forwards for state in states) - whole.forwards_here
    return whole
