"""Volumes and pictures inside a page: NIfTI as base64, and PNG."""

from __future__ import annotations

import base64
import gzip
import struct
import zlib

import nibabel as nib
import numpy as np

__all__ = ["embedded", "encoded", "png"]

_OFFSET = 352  # of the voxels in a NIfTI file with one empty extension
_LEVELS = 1000


def embedded(codes: np.ndarray, affine: np.ndarray, step: float = 1.0, low: float = 0.0) -> str:
    """A volume as the base64 of a packed NIfTI file, which is the same for the same volume.

    Args:
        codes: ``(*spatial)`` or, for colours in uint8, ``(*spatial, 3)``; uint8 or int16.
        affine: ``(4, 4)``, from voxels to scanner mm.
        step: between the values of two codes.
        low: the value of code 0.

    Example::

        >>> text = embedded(np.array([[[0, 2]]], np.int16), np.eye(4), step=0.5)
        >>> nib.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(text))).get_fdata().tolist()
        [[[0.0, 1.0]]]
    """
    header = nib.Nifti1Header()
    header.set_data_dtype(codes.dtype)
    header.set_data_shape(codes.shape)
    header.set_sform(affine, code=1)
    header.set_qform(affine, code=1, strip_shears=True)
    header.set_xyzt_units("mm")
    header["scl_slope"], header["scl_inter"] = step, low
    header["vox_offset"], header["magic"] = _OFFSET, b"n+1"
    voxels = header.binaryblock + bytes(_OFFSET - len(header.binaryblock)) + codes.tobytes(order="F")
    return base64.b64encode(gzip.compress(voxels, 6, mtime=0)).decode()


def encoded(saliency: np.ndarray) -> tuple[np.ndarray, float]:
    """A map as whole numbers in int16, and the step between them: a thousandth of its largest absolute value.

    Zero stays zero, and so do values that are not finite.
    """
    finite = np.nan_to_num(saliency, posinf=0, neginf=0).astype(np.float64)
    largest = float(np.abs(finite).max(initial=0))
    step = largest / _LEVELS if largest > 0 else 1.0
    # What the NIfTI header holds.
    step = float(np.float32(step))
    return np.rint(finite / step).astype(np.int16), step


def png(pixels: np.ndarray) -> bytes:
    """A picture as a PNG file.

    Args:
        pixels: ``(rows, columns, 3)`` in uint8.

    Example::

        >>> png(np.zeros((2, 2, 3), np.uint8))[1:4]
        b'PNG'
    """
    rows, columns = pixels.shape[:2]
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], axis=1)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
