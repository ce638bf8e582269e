"""Every private name of another package that we lean on, so that a new release of it is checked in one place."""

from monai.inferers.utils import _get_scan_interval as scan_interval

__all__ = ["scan_interval"]
