"""Masks shared by the ranks of a process group: the plain map on every rank, and no rank that waits for ever."""

from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from helpers.forked_ranks import on_ranks
from helpers.own_pipeline import Network
from helpers.tolerances import assert_close, assert_same_bits
from monai.data import DataLoader, MetaTensor
from monai.inferers import SlidingWindowInferer
from monai.utils import string_list_all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader as TorchDataLoader

import monai_saliency as ms
from monai_saliency.distributed.process_group import BatchExplainer, MasksOverRanks
from monai_saliency.errors import CaseError
from monai_saliency.utils.monai_private import single_process

MASKS, BATCH = 37, 4
TARGET = ms.ClassScore("all", "softmax")


def images(count: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(count, 1, 14, 17, generator=torch.Generator().manual_seed(seed))


def rise(num_masks: int = MASKS, **settings: Any) -> ms.PerturbationInferer:
    return ms.rise(num_masks, 3, target=TARGET, mask_batch_size=BATCH, **settings)


def over_ranks(inferer: ms.PerturbationInferer, group: Any = None) -> ms.PerturbationInferer:
    return inferer.replace(sharing=MasksOverRanks(group))


def segment(output: torch.Tensor) -> torch.Tensor:
    return output.mean(dim=(2, 3))


def windows() -> ms.PerturbationInferer:
    """Under a sliding window, whose patches are remembered."""
    inner = SlidingWindowInferer((8, 8), 3, overlap=0.5)
    return ms.sliding_window(4, 3, target=ms.FunctionScore(segment), mask_batch_size=BATCH, inferer=inner)


def smooth(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.avg_pool2d(x, 3, 1, 1).tanh()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_plain_maps(world_size: int) -> None:
    """To the bit: one image and five, more ranks than batches, and remembered patches."""
    plain: list[tuple[Callable[[], Any], Any, Callable[..., Any]]] = [
        (rise, images(1), Network()),
        (rise, images(5), Network()),
        (lambda: rise(2), images(1), Network()),
        (windows, images(1), smooth),
    ]
    expected = [make().explain(inputs, network) for make, inputs, network in plain]

    def explain(rank: int) -> Any:
        return [
            [(e.saliency, e.scores, e.reference_scores, e.num_forwards) for e in over_ranks(make()).explain(x, net)]
            for make, x, net in plain
        ]

    for found in on_ranks(world_size, explain):
        for whole, parts in zip(expected, found, strict=True):
            for one, (saliency, scores, reference, _) in zip(whole, parts, strict=True):
                assert_same_bits(saliency, one.saliency)
                assert_same_bits(scores, one.scores)
                assert_same_bits(reference, one.reference_scores)
        # All forwards of all ranks: each has run the first batch, with an image that is not counted.
        assert found[0][0][3] == MASKS + 1 + (world_size - 1) * (BATCH - 1)


def test_what_goes_wrong_on_one_rank_is_told_to_all() -> None:
    def explain(rank: int) -> Any:
        errors = []
        for error in (MemoryError("out of memory"), CaseError("brain", "is a lung")):

            def network(x: torch.Tensor, error: Exception = error) -> torch.Tensor:
                if rank == 1:
                    raise error
                return x.flatten(1)[:, :3]

            with pytest.raises((MemoryError, RuntimeError, CaseError)) as caught:
                over_ranks(rise())(images(1), network)
            errors.append((type(caught.value), str(caught.value)))
        return errors, over_ranks(rise())(images(1), Network())

    expected = rise()(images(1), Network())
    told = (RuntimeError, "rank 1 has failed: MemoryError: out of memory"), (CaseError, "case brain: is a lung")
    own = (MemoryError, "out of memory"), (CaseError, "case brain: is a lung")
    for rank, (errors, maps) in enumerate(on_ranks(3, explain)):
        assert tuple(errors) == (own if rank == 1 else told)
        assert_same_bits(maps, expected)


def test_ranks_that_do_not_agree_are_refused() -> None:
    def explain(rank: int) -> Any:
        messages = []
        for inferer, x in [(rise(), images(1) + rank), (rise(MASKS + rank), images(1)), (rise(), images(1 + rank))]:
            with pytest.raises(ValueError, match="ranks share the masks of an image") as caught:
                over_ranks(inferer)(x, Network())
            messages.append(str(caught.value))
        # Preprocessing on another machine may differ by rounding.
        rounded = images(1) * (1 + rank * 1e-6)
        return messages, over_ranks(rise())(rounded, Network())

    (first, maps), (second, others) = on_ranks(2, explain)
    assert first == second
    for words, message in zip(
        ("the score of the unperturbed image (", "masks. Leave", "number of images (1 and 2)"), first, strict=True
    ):
        assert words in message
    assert_same_bits(maps, others)


def test_a_distributed_network_is_run_as_it_is_inside() -> None:
    """Forwards of ``DistributedDataParallel`` send buffers to all ranks, which run other numbers of them."""
    expected = rise(3)(images(1), Network())

    def explain(rank: int) -> Any:
        network = DistributedDataParallel(Network())
        masks = over_ranks(rise(3))(images(1), network)
        (row,) = BatchExplainer(network, rise(3 + 8 * rank))(images(1))
        return masks, row["saliency"].as_tensor()

    for rank, (masks, cases) in enumerate(on_ranks(2, explain)):
        assert_same_bits(masks, expected)
        assert_same_bits(cases, rise(3 + 8 * rank)(images(1), Network())[0])


def test_a_bundles_handlers_take_their_process_for_the_only_one() -> None:
    def gather(rank: int) -> Any:
        outside = idist.get_world_size(), idist.get_rank(), string_list_all_gather([f"from {rank}"])
        with single_process():
            # Not by both: it would wait for ever.
            inside = [idist.get_world_size(), idist.get_rank(), string_list_all_gather(["own"])] if rank else None
        return outside, inside, idist.get_world_size()

    both = ["from 0", "from 1"]
    assert on_ranks(2, gather) == [((2, 0, both), None, 2), ((2, 1, both), [1, 0, ["own"]], 2)]


class TestBatchExplainer:
    def scans(self) -> list[dict[str, Any]]:
        affines = [torch.eye(4, dtype=torch.float64) * torch.tensor([size, size, 1, 1]) for size in (2.0, 3.0)]
        return [
            {"image": MetaTensor(image, affine=affine, meta={"filename_or_obj": f"{i}.nii.gz"}), "case": f"case{i}"}
            for i, (image, affine) in enumerate(zip(images(2), affines, strict=True))
        ]

    @pytest.mark.parametrize(("split", "loader"), [("cases", DataLoader), ("masks", TorchDataLoader)])
    def test_maps_lie_on_their_images(self, split: str, loader: Any) -> None:
        scans = self.scans()
        (batch,) = loader(scans, batch_size=2)
        rows = BatchExplainer(Network(), rise(), split)(batch)
        expected = rise().explain(images(2), Network())
        for row, scan, one in zip(rows, scans, expected, strict=True):
            assert row["case"] == scan["case"]
            assert_same_bits(row["saliency"].as_tensor(), one.saliency)
            assert_same_bits(row["saliency"].affine, scan["image"].affine)
            assert row["saliency"].meta["filename_or_obj"] == scan["image"].meta["filename_or_obj"]
            assert row["explained"] == one.explained
            row["saliency"].affine[0, 0] = 7  # its own
            assert scan["image"].affine[0, 0] != 7
        assert not torch.equal(batch["image"].affine[0], rows[0]["saliency"].affine)

    def test_label_maps_and_held_inputs(self) -> None:
        labels = torch.zeros(2, 1, 14, 17, dtype=torch.int64)
        labels[0, :, :5], labels[1, :, 7:] = 1, 3
        batch = {"scan": images(2), "organs": labels, "age": torch.tensor([[40.0], [60.0]])}
        network = lambda inputs: inputs["scan"].flatten(1).mean(1, keepdim=True) * inputs["age"]  # noqa: E731
        total = lambda output: output  # noqa: E731
        inferer = ms.region_occlusion(target=ms.FunctionScore(total), inputs=ms.DictInput("scan"))
        explain = BatchExplainer(network, inferer, image_key="scan", label_key="organs", held_keys=["age"])
        for row, image, organs, age in zip(explain(batch), images(2), labels, (40.0, 60.0), strict=True):
            drop = (image * (organs > 0)).sum() / image.numel() * age
            assert_close(row["saliency"].as_tensor(), drop * (organs > 0))
