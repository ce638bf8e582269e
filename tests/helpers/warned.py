"""The warnings that this package gives, among those of others."""

import logging
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

import monai_saliency
from helpers.paths import TESTS

OURS = (Path(monai_saliency.__file__).parent, TESTS)


def our_warnings(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """The texts of the warnings that point to a line of this package or of its tests.

    Other packages give more, such as ITK when it is imported by the first loader of images.
    """
    found = [warning for warning in caught if any(map(Path(warning.filename).is_relative_to, OURS))]
    return [str(warning.message) for warning in found]


def logged_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings in the log, but for those of a fill that leaves most of the score, as small networks have it."""
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [each for each in found if "hiding the whole scan leaves" not in each]
