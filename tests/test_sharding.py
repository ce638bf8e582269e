"""Units of work: nothing is left out, nothing is done twice, and nobody has much more than another."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monai_saliency.sharding import Part, Unit, units


@given(st.integers(0, 1000), st.integers(1, 40))
def test_parts_make_the_whole(length: int, count: int) -> None:
    parts = [Part(index, count).of(length) for index in range(count)]
    assert [i for part in parts for i in part] == list(range(length))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 40), st.sampled_from(["auto", "cases", "masks"]))
def test_workers_do_every_part_of_every_case_once(count: int, num_workers: int, split: str) -> None:
    shares = [units(count, num_workers, split)[rank::num_workers] for rank in range(num_workers)]
    done = Counter(unit for share in shares for unit in share)
    assert set(done.values()) <= {1}
    for index in range(count):
        parts = sorted((u.part for u in done if u.index == index), key=lambda part: part.index)
        assert parts == [Part(i, len(parts)) for i in range(len(parts))]
    # In parts of a case, and in cases.
    work = [sum(1 / unit.part.count for unit in share) for share in shares]
    if split == "masks":
        assert max(work) - min(work) < 1e-9
    if split == "auto" and count:
        assert all(shares)
    # A worker has one kind of part, so one pass over its cases is enough.
    assert all(len({unit.part for unit in share}) <= 1 for share in shares)


def test_by_hand() -> None:
    assert units(3, 2) == [Unit(0), Unit(1), Unit(2)]
    assert units(2, 5) == [
        Unit(0, Part(0, 3)),
        Unit(1, Part(0, 2)),
        Unit(0, Part(1, 3)),
        Unit(1, Part(1, 2)),
        Unit(0, Part(2, 3)),
    ]
    assert units(2, 2, "masks") == [Unit(0, Part(0, 2)), Unit(0, Part(1, 2)), Unit(1, Part(0, 2)), Unit(1, Part(1, 2))]
    assert units(1, 3, "cases") == [Unit(0)]
    assert units(0, 3) == []


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"`split` must be one of \['auto', 'cases', 'masks'\], got 'images'"):
        units(3, 2, "images")
    with pytest.raises(ValueError, match="`num_workers` must be a whole number of at least 1, got 0"):
        units(3, 0)
    with pytest.raises(ValueError, match="part 2 of 2 does not exist"):
        Part(2, 2)
