"""What holds for masks of every family."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.masks import bind, boxes_of_regions
from helpers.patches import blocks
from helpers.searches import driven
from helpers.tolerances import DOUBLE, MASKS, SINGLE, assert_close
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.masks import Masks, OrderMasks, base
from monai_saliency.masks.minimal import BoundMinimalMasks

RISE, WINDOWS = ms.masks.RISEMasks(12, 3, seed=4), ms.masks.SlidingWindowMasks(4, 3)


@pytest.mark.parametrize("masks", [RISE, WINDOWS], ids=lambda masks: type(masks).__name__)
class TestSums:
    def test_rendering_ignores_autocast(self, masks: Masks) -> None:
        bound = bind(masks, 15, 11, 6)
        expected = bound.render(range(5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(bound.render(range(5)), expected)

    def test_stream_is_render_in_pieces(self, masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
        bound, ids = bind(masks, 10, 7), [4, 0, 8, 3, 3]
        monkeypatch.setattr(base, "_MOST_VOXELS", 2 * 70)
        pieces = list(bound.stream(ids))
        assert [ids[chunk] for chunk, _ in pieces] == [[4, 0], [8, 3], [3]]
        assert_close(torch.cat([piece for _, piece in pieces]), bound.render(ids), within=MASKS)

    @pytest.mark.parametrize("num_weights", [1, 3, 7])
    def test_weighted_sum_is_the_sum_of_rendered_masks(self, masks: Masks, num_weights: int) -> None:
        for shape, dtype, within in (((10, 7), torch.float64, DOUBLE), ((9, 8, 7), torch.float32, SINGLE)):
            bound, ids = bind(masks, *shape, dtype=dtype), [5, 0, 3, 3, 8]
            weights = torch.randn(5, num_weights, dtype=dtype, generator=torch.Generator().manual_seed(0))
            expected = torch.einsum("nk,n...->k...", weights.double(), bound.render(ids).double())
            assert_close(bound.weighted_sum(ids, weights), expected, within=within)

    @pytest.mark.parametrize("ids", [[5, 0, 3, 3, 8], range(2, 7)])
    def test_along_axes_is_the_product_with_rendered_masks(self, masks: Masks, ids: Sequence[int]) -> None:
        bound, generator = bind(masks, 9, 8, 7, dtype=torch.float64), torch.Generator().manual_seed(0)
        matrices = [torch.randn(n, k, dtype=torch.float64, generator=generator) for n, k in ((9, 4), (8, 1), (7, 12))]
        expected = torch.einsum("ncxyz,xa,yb,zd->ncabd", bound.render(ids).double(), *matrices)
        found = bound.along_axes(ids, matrices)
        assert found.dtype == bind(masks, 9, 8, 7).along_axes(ids, matrices).dtype == torch.float64
        assert_close(found, expected)

    @pytest.mark.parametrize("ids", [[-1], [0, 9999], range(3, 10_000), range(-1, 2)])
    def test_index_out_of_range(self, masks: Masks, ids: object) -> None:
        bound = bind(masks, 10, 7)
        with pytest.raises(IndexError, match=rf"mask ids must be in \[0, {len(bound)}\), got (-1|9999)"):
            bound.render(ids)


#: masks for images of two channels, in 2D and 3D
FAMILIES: dict[str, Masks] = {
    "rise": RISE,
    "random grid": ms.masks.RandomGridMasks(9, 3, 0.4, seed=4),
    "fills": ms.masks.MCRISEMasks(9, [ms.ConstantFill(1.0)], 3),
    "windows": ms.masks.SlidingWindowMasks(3, 2),
    "large windows": ms.masks.SlidingWindowMasks(6, 2),
    "smooth windows": ms.masks.SlidingWindowMasks(2, 2, smooth=3),
    "several sizes": ms.masks.MultiScaleWindowMasks(4, 2),
    "hierarchy": ms.masks.HierarchicalMasks(4, 2),
    "balls": ms.masks.SlidingRadialMasks(2.5, 3),
    "blurred balls": ms.masks.SlidingRadialMasks(2, 3, 1.2),
    "regions": ms.masks.RegionMasks(),
    "sets of regions": ms.masks.RegionMasks(40, 0.7),
    "region hierarchy": ms.masks.RegionHierarchyMasks(window_size=3, levels=3),
    "grid": ms.masks.GridMasks(20, 3),
    "design": ms.masks.SobolMasks(4, 2),
    "coalitions": ms.masks.CoalitionMasks(background=False, num_coalitions=60),
    "coalitions of channels": ms.masks.CoalitionMasks(per_channel=True, num_coalitions=60),
    "channels": ms.masks.ChannelMasks(ms.masks.SlidingWindowMasks(4, 3)),
    "smooth channels": ms.masks.ChannelMasks(ms.masks.SlidingWindowMasks(4, 3, smooth=3)),
    "independent channels": ms.masks.IndependentChannelMasks(ms.masks.RISEMasks(9, 3, seed=3)),
    "sets of windows": ms.masks.MinimalMasks(0.5, ms.masks.HierarchicalMasks(4, 2)),
    "until": ms.masks.UntilMasks(ms.masks.RISEMasks(40, 3), ms.estimators.RISEScoring(), first=20),
}
#: more than these begin with the same masks
MORE = {
    "rise": ms.masks.RISEMasks(15, 3, seed=4),
    "random grid": ms.masks.RandomGridMasks(20, 3, 0.4, seed=4),
    "sets of regions": ms.masks.RegionMasks(99, 0.7),
    "grid": ms.masks.GridMasks(33, 3),
    "design": ms.masks.SobolMasks(8, 2),
    "independent channels": ms.masks.IndependentChannelMasks(ms.masks.RISEMasks(11, 3, seed=3)),
}


def bound_to(masks: Masks, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    return masks.bind(torch.zeros(2, *shape, dtype=dtype), blocks(shape, 4, 5, seed=2))


def ids_of(bound: Any) -> list[Any]:
    """Some ids of every kind."""
    if isinstance(bound, BoundMinimalMasks):
        generator = torch.Generator().manual_seed(0)
        return driven(bound, torch.ones(1), lambda ids: torch.rand(len(ids), 1, generator=generator)).ids
    if not hasattr(bound, "grids"):
        return list(bound.first_round())
    if not hasattr(bound, "values"):
        return [(level, *place) for level, grid in enumerate(bound.grids) for place in np.ndindex(*grid)]
    first = bound.first_round()
    finer = [piece for part in first for piece in bound._pieces(part)]
    return [*first, *finer, *(piece for part in finer for piece in bound._pieces(part))]


@pytest.mark.parametrize("shape", [(9, 12), (8, 9, 7)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mask_is_known_by_its_id_and_so_are_its_parts(name: str, shape: tuple[int, ...]) -> None:
    """Law 2, and what masks say of a part of an image, against their full-size form."""
    bound = bound_to(FAMILIES[name], shape)
    ids = ids_of(bound)
    whole = bound.render(ids)
    assert whole.shape == (len(ids), bound.channels or 1, *shape)
    assert 0 <= float(whole.min()) < float(whole.max()) <= 1
    is_exact = "smooth" not in name and "balls" not in name  # of others, rows tell apart what only happens to agree
    picked = np.random.default_rng(0).permutation(len(ids)).tolist()[:20]
    chosen = [ids[row] for row in picked]
    for again in (bound, bound_to(FAMILIES[name], shape), bound_to(MORE.get(name, FAMILIES[name]), shape)):
        assert_close(again.render(chosen), whole[picked], within=MASKS)
    for row, side in zip(picked, bound.changed_boxes(chosen) or [], strict=False):
        outside = whole[row].clone()
        outside[(slice(None), *side)] = 1
        assert float(outside.min()) == 1
    for start, size in ((0, 20), (2, 4), (6, 1)):
        box = tuple(slice(start, min(start + size, n)) for n in shape)
        inside = bound.render(ids, box=box)
        assert_close(inside, whole[(..., *box)], within=MASKS)
        if (restricted := bound.restrict(ids, box)) is None:
            continue
        (hides, rows), flat = restricted, inside.flatten(1)
        assert bool((flat[~torch.from_numpy(hides)] == 1).all())
        assert not is_exact or hides.tolist() == (flat < 1).any(dim=1).tolist()
        for a, b in itertools.combinations(np.flatnonzero(hides)[:40], 2):
            equal, same = np.array_equal(rows[a], rows[b]), torch.allclose(flat[a], flat[b], rtol=0, atol=MASKS)
            assert equal == same or (same and not is_exact)


@pytest.mark.parametrize("name", FAMILIES)
def test_law_9_precision_follows_the_image(name: str) -> None:
    single, double = (bound_to(FAMILIES[name], (9, 8), dtype) for dtype in (torch.float32, torch.float64))
    ids = ids_of(single)[:3]
    assert (single.render(ids).dtype, double.render(ids).dtype) == (torch.float32, torch.float64)
    assert_close(single.render(ids).double(), double.render(ids), within=MASKS)
    assert torch.equal(bound_to(FAMILIES[name], (9, 8), torch.float16).render(ids), single.render(ids))


def test_keys_tell_masks_apart() -> None:
    keys = [repr(bound_to(masks, (9, 8)).key) for masks in (*FAMILIES.values(), *MORE.values())]
    keys += [repr(bound_to(masks, (8, 9)).key) for masks in (RISE, WINDOWS, FAMILIES["regions"], FAMILIES["balls"])]
    assert len({*keys}) == len(keys)


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAMILIES)
def test_law_2_devices_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    bound = bound_to(FAMILIES[name], (33, 20))
    on_gpu = bound.render(ids_of(bound)[:6], device="cuda")
    assert on_gpu.is_cuda
    assert_close(on_gpu.cpu(), bound.render(ids_of(bound)[:6]), within=MASKS)
    assert torch.backends.cuda.matmul.allow_tf32


REGION = {"target": ms.RegionScore(0, "none", region="all"), "inferer": SlidingWindowInferer((16, 12), 4, 0.5)}


@pytest.mark.parametrize(
    ("method", "settings", "share"),
    [
        (ms.hsic, {"num_masks": 30, "grid_size": (5, 3)}, 2),
        (ms.sobol, {"num_designs": 2, "grid_size": (5, 3)}, 0.5),
        (ms.sliding_window, {"window_size": (6, 4), "stride": (5, 4), "smooth": 3}, 0.7),
        (ms.region_occlusion, {"regions": boxes_of_regions}, 0.7),
        (ms.hierarchical_occlusion, {"window_size": (8, 6), "levels": 3, "keep": 0.2}, 0.7),
        (ms.hierarchical_occlusion, {"regions": lambda image, _: blocks(image.shape[1:], 5, 60, seed=5)}, 0.7),
    ],
)
def test_remembered_patches(method: Any, settings: dict[str, Any], share: float) -> None:
    """The same scores and rounds as whole images, from a part of the forwards."""
    image = torch.rand(1, 1, 40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    network = lambda x: torch.nn.functional.avg_pool2d(x, 3, 1, 1).square()  # noqa: E731
    explain = [method(**REGION, **settings, patch_memory=memory) for memory in (True, False)]
    remembered, whole = (each.explain(image, network)[0] for each in explain)
    assert list(remembered.ids) == list(whole.ids)
    assert_close(remembered.scores, whole.scores)
    assert_close(remembered.saliency, whole.saliency)
    assert remembered.num_forwards / remembered.per_prediction < share * whole.num_forwards


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (ms.masks.RISEMasks, {"num_masks": 4, "p1": 5}, r"`p1` must be in \[0, 1\], got 5"),
    (ms.masks.RISEMasks, {"num_masks": 4, "p1": float("nan")}, r"`p1` must be a finite number, got nan"),
    (ms.masks.RISEMasks, {"num_masks": 0}, "`num_masks` must be a whole number of at least 1, got 0"),
    (ms.masks.RISEMasks, {"num_masks": 4, "grid_size": (8, 0)}, r"`grid_size` must be a whole number .*, got \(8, 0\)"),
    (ms.masks.RISEMasks, {"num_masks": 4, "seed": None}, "`seed` must be a whole number of at least 0, got None"),
    (ms.masks.GridMasks, {"num_masks": 5, "seed": -1}, "`seed` must be a whole number of at least 0, got -1"),
    (ms.masks.SobolMasks, {"num_designs": 1}, "`num_designs` must be a whole number of at least 2, got 1"),
    (ms.masks.RandomGridMasks, {"num_masks": 3, "unit": "mm"}, "`unit` 'mm' needs a `cell_size`"),
    (
        ms.masks.RandomGridMasks,
        {"num_masks": 3, "cell_size": 0},
        "`cell_size` must be a whole number of at least 1, got 0",
    ),
    (
        ms.masks.SlidingWindowMasks,
        {"window_size": 2.5},
        r"`window_size` must be a whole number of at least 1, got 2\.5",
    ),
    (
        ms.masks.SlidingWindowMasks,
        {"window_size": 3, "stride": (1, 0)},
        r"`stride` must be a whole number .*, got \(1, 0\)",
    ),
    (
        ms.masks.SlidingWindowMasks,
        {"window_size": 5, "unit": "cm"},
        r"`unit` must be one of \['mm', 'voxel'\], got 'cm'",
    ),
    (
        ms.masks.SlidingWindowMasks,
        {"window_size": [3, -1], "unit": "mm"},
        r"`window_size` must be a number above 0, got",
    ),
    (
        ms.masks.SlidingWindowMasks,
        {"window_size": 3, "smooth": -1},
        "`smooth` must be at least 0, got",
    ),
    (ms.masks.MultiScaleWindowMasks, {"levels": 0}, "`levels` must be a whole number of at least 1, got 0"),
    (ms.masks.MultiScaleWindowMasks, {"unit": "mm"}, "`unit` 'mm' needs a `window_size`"),
    (ms.masks.SlidingRadialMasks, {"radius": 0}, "`radius` must be a number above 0, got 0"),
    (ms.masks.SlidingRadialMasks, {"sigma": -1}, "`sigma` must be at least 0"),
    (ms.masks.SlidingRadialMasks, {"unit": "mm"}, "`unit` 'mm' needs a `radius`"),
    (ms.masks.HierarchicalMasks, {"keep": 0}, r"`keep` must be in \(0, 1\]"),
    (ms.masks.HierarchicalMasks, {"keep": 1.5}, r"`keep` must be in \(0, 1\]"),
    (ms.masks.RegionHierarchyMasks, {"levels": 0}, "`levels` must be a whole number of at least 1"),
    (ms.masks.RegionHierarchyMasks, {"regions": "organs"}, "`regions` must be a function"),
    (ms.masks.MinimalMasks, {"share": 0}, r"`share` must be in \(0, 1\]"),
    (ms.masks.MinimalMasks, {"share": 1.5}, r"`share` must be in \(0, 1\]"),
    (ms.masks.CoalitionMasks, {"num_coalitions": 0}, "`num_coalitions` must be a whole number of at least 1"),
    (ms.masks.CoalitionMasks, {"regions": ms.Supervoxels}, r"write Supervoxels\("),
    (ms.masks.CoalitionMasks, {"background": 3}, "`background`"),
    (OrderMasks, {"saliency": torch.ones(9, 9), "steps": 0}, "`steps` must be a whole number"),
    (
        ms.masks.MCRISEMasks,
        {"num_masks": 5, "more_fills": ms.ConstantFill(1.0)},
        r"be a list of fills such as \[ConstantFill",
    ),
    (
        ms.masks.MCRISEMasks,
        {"num_masks": 5, "more_fills": [1.0]},
        r"`more_fills` must be functions of images .*, got 1\.0",
    ),
    (ms.masks.IndependentChannelMasks, {"masks": WINDOWS}, "SlidingWindowMasks has no `num_masks`: use ChannelMasks"),
    (
        ms.masks.IndependentChannelMasks,
        {"masks": ms.masks.RegionMasks()},
        "RegionMasks has no `num_masks`: use ChannelMasks",
    ),
]


@pytest.mark.parametrize(("family", "settings", "match"), WRONG)
def test_wrong_settings(family: Any, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        family(**settings)


@pytest.mark.parametrize(
    ("masks", "match"),
    [
        (
            ms.masks.RISEMasks(4, (4, 4, 4)),
            r"`grid_size` must be one number or one per spatial axis \(2\), got \(4, 4, 4\)",
        ),
        (ms.masks.GridMasks(5, (2, 2, 2)), "one number or one per spatial axis"),
        (ms.masks.RandomGridMasks(3, (2, 2, 2)), "`cell_size` must be one number or one per spatial axis"),
        (ms.masks.RandomGridMasks(3, 5, unit="mm"), "sizes in mm need the image's voxel sizes, which are unknown"),
        (ms.masks.SlidingWindowMasks(9), r"`window_size` \(9, 9\) is larger than.*\(8, 8\).*use a smaller one"),
        (ms.masks.SlidingWindowMasks(5.5, unit="mm"), "sizes in mm need the image's voxel sizes, which are unknown"),
        (ms.masks.SlidingWindowMasks(3, (1, 1, 1)), "`stride` must be one number or one per spatial axis"),
        (ms.masks.SlidingWindowMasks(3, smooth=(1, 2, 3)), "`smooth` must be one number or one per spatial axis"),
        (ms.masks.MultiScaleWindowMasks(9), r"`window_size` .* is larger than the image"),
        (ms.masks.SlidingRadialMasks(5, unit="mm"), "sizes in mm need the image's voxel sizes"),
        (ms.masks.SlidingRadialMasks(2, (1, 1, 1)), "`stride` must be one number or one per spatial axis"),
        (ms.masks.HierarchicalMasks(9), r"one window of \(8, 8\) voxels covers the whole image"),
        (
            ms.masks.IndependentChannelMasks(ms.masks.MCRISEMasks(5, [ms.ConstantFill(1.0)])),
            "already: leave out `per_channel`",
        ),
        (ms.masks.ChannelMasks(ms.masks.ChannelMasks(WINDOWS)), "have masks for each channel or fill already"),
    ],
)
def test_masks_that_do_not_fit_the_image(masks: Masks, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        bind(masks, 8, 8)
