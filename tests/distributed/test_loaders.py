"""Loaders that several processes share: the same batches in each, and each batch in one of them."""

from __future__ import annotations

import copy

import pytest
import torch
from monai.data import DataLoader, Dataset, ThreadDataLoader
from torch.utils.data import DistributedSampler, SubsetRandomSampler

from monai_saliency.distributed.loaders import in_order, take


@pytest.mark.parametrize("kind", [DataLoader, ThreadDataLoader])
def test_batches_of_a_loader(kind: type[DataLoader]) -> None:
    loader = kind(Dataset([{"image": torch.tensor([float(i)])} for i in range(7)]), batch_size=2)
    whole = [batch["image"].flatten().tolist() for batch in loader]
    for indices in ([0, 2], [3], [], [1, 2, 3]):
        taken = take(loader, indices)
        assert type(taken) is kind
        assert len(taken) == len(indices)
        for _ in range(2):
            assert [batch["image"].flatten().tolist() for batch in taken] == [whole[i] for i in indices]
        plain = take(copy.copy(whole), indices)
        assert list(plain) == [whole[i] for i in indices]
    assert [batch["image"].flatten().tolist() for batch in loader] == whole


@pytest.mark.parametrize("kind", [DataLoader, ThreadDataLoader])
@pytest.mark.parametrize("sampler", ["shuffle", "distributed"])
def test_every_process_has_the_same_batches(
    kind: type[DataLoader], sampler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a loader made of them for itself: otherwise cases are lost, and others explained twice."""
    dataset = Dataset([{"image": torch.tensor([float(i)])} for i in range(7)])
    plain = kind(dataset, batch_size=2, num_workers=0)
    own = {"shuffle": True} if sampler == "shuffle" else {"sampler": DistributedSampler(dataset, 2, 1)}
    loader = kind(dataset, batch_size=2, num_workers=0, **own)
    taken = [take(in_order(loader), indices) for indices in ([0, 2], [1, 3])]
    found = [[batch["image"].flatten().tolist() for batch in each] for each in taken]
    whole = [batch["image"].flatten().tolist() for batch in plain]
    assert found == [[whole[0], whole[2]], [whole[1], whole[3]]]
    assert "gives each process other cases or another order: the cases are taken in the dataset's" in caplog.text
    assert in_order(plain) is plain


def test_a_loader_that_draws_some_cases_cannot_be_shared() -> None:
    dataset = Dataset([{"image": torch.tensor([float(i)])} for i in range(7)])
    loader = DataLoader(dataset, sampler=SubsetRandomSampler(range(3)))
    with pytest.raises(ValueError, match="SubsetRandomSampler gives each process other cases"):
        in_order(loader)
