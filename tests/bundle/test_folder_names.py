"""Output folders named by settings."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from monai_saliency.bundle.command import folder_name, settings_of


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "default"),
        ({"method": "rise", "num_masks": 4000}, "method=rise,num_masks=4000"),
        ({"num_masks": 4000, "method": "rise"}, "num_masks=4000,method=rise"),
        ({"fill": -1.5e3}, "fill=-1500.0"),
        ({"classes": [1, 2]}, "classes=[1,2]"),
    ],
)
def test_names(given: dict[str, Any], name: str) -> None:
    assert folder_name(given) == name


@pytest.mark.parametrize(
    ("given", "name", "text"),
    [
        ({"dataset_dir": "/data/a b"}, "dataset_dir=-data-a-b", "dataset_dir=/data/a b"),
        ({"classes": (1, 2)}, "classes=-1,2-", "classes=(1,2)"),
        ({"section": "Prüfung"}, "section=Pr--fung", "section=Prüfung"),
        ({"checkpoint": "x" * 200}, f"checkpoint={'x' * 139}", f"checkpoint={'x' * 200}"),
    ],
)
def test_what_a_name_cannot_have(given: dict[str, Any], name: str, text: str) -> None:
    """The checksum is the one that `sha256sum` gives for a line of this text."""
    assert folder_name(given) == f"{name}-{hashlib.sha256(f'{text}{chr(10)}'.encode()).hexdigest()[:8]}"


def test_settings_of_a_name() -> None:
    assert settings_of("method=rise,num_masks=4000") == {"method": "rise", "num_masks": "4000"}
    assert settings_of("classes=[1,2],pixdim=[1,1,2]") == {"classes": "[1,2]", "pixdim": "[1,1,2]"}
    assert settings_of("checkpoint=,seed=1") == {"checkpoint": "", "seed": "1"}
    assert settings_of("cache") == {}
