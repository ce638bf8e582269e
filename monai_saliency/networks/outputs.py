"""What a network gives, read and cut into rows: tensors, and dictionaries, tuples and lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["OutputPath", "check_rows", "choices", "num_rows", "read", "rows", "shape"]

OutputPath: TypeAlias = "str | int | Sequence[str | int] | Callable[[Any], Any]"
_SHOWN = 12


def read(output: Any, path: OutputPath | None) -> Any:
    """The part of an output that is explained.

    Args:
        output: what the network gave for a batch.
        path: a key, an index, several of them from the outside in such as ``("pred", 0)``, a callable that takes the
            output, or None for all of it.

    Raises:
        ValueError: when there is no such part; the message lists those that there are.
    """
    if path is None:
        return output
    if callable(path):
        return path(output)
    part = output
    for step in (path,) if isinstance(path, (str, int)) else path:
        try:
            if isinstance(part, torch.Tensor):
                # An index into a tensor would read one image of the batch.
                raise TypeError("a tensor has no parts")
            part = part[step]
        except (KeyError, IndexError, TypeError) as error:
            known = choices(output) or f"it is one {type(output).__name__}, so leave `output` out"
            raise ValueError(f"the network's output has no part {path!r}: {known}") from error
    return part


def check_rows(output: Any, count: int) -> None:
    """Refuse an output that is not of a batch of ``count`` images.

    Raises:
        ValueError: saying which part of it is not.
    """
    parts = list(_leaves(output, count))
    if not any(isinstance(part, (torch.Tensor, list, tuple)) for _, part in parts):
        raise ValueError(
            f"the network gave a {type(output).__name__} without tensors; give the inferer a callable as `output` that "
            "reads tensors from it"
        )
    for path, part in parts:
        if _is_list_of(Mapping, part) and len(part) != count:
            what = f"a list of {len(part)} dictionaries{_at(path)}"
            should = "it must have one entry an image"
        elif isinstance(part, torch.Tensor) and (part.ndim == 0 or len(part) != count):
            what = f"an output of shape {tuple(part.shape)}{_at(path)}"
            should = "its first axis must be the batch"
        else:
            continue
        other = "; choose another part by `output`" if path else ""
        raise ValueError(f"the network gave {what} for a batch of {count} images; {should}{other}")


def rows(output: Any, start: int, stop: int, count: int) -> Any:
    """The rows [start, stop) of an output of ``count`` images.

    Tensors are cut along their first axis; dictionaries, tuples and lists of tensors part by part, as deep supervision
    gives them; a list with one entry an image, as detectors give it, by entry. What is no tensor stays as it is.

    Args:
        output: one that :func:`check_rows` lets pass.
        start: first row.
        stop: last row + 1.
        count: all rows.
    """
    if isinstance(output, torch.Tensor) or _by_image(output, count):
        return output[start:stop]
    if isinstance(output, Mapping):
        return {key: rows(part, start, stop, count) for key, part in output.items()}
    if isinstance(output, (tuple, list)):
        return [rows(part, start, stop, count) for part in output]
    return output


def num_rows(output: Any) -> int:
    """The number of images that an output is of."""
    if _is_list_of(Mapping, output):
        return len(output)
    return next((len(part) for _, part in _leaves(output) if isinstance(part, torch.Tensor) and part.ndim), 0)


def choices(output: Any) -> str:
    """The tensors of a structured output in words: what ``output`` may be, and what shape that reads."""
    found = [(path, part) for path, part in _leaves(output) if path and isinstance(part, torch.Tensor)]
    named = [f"output={_short(path)!r} reads {shape(part)}" for path, part in found[:_SHOWN]]
    return ", ".join([*named, *(["..."] if len(found) > _SHOWN else [])])


def shape(output: torch.Tensor) -> str:
    """A tensor's shape with its batch axis as B."""
    return f"({', '.join(['B', *map(str, output.shape[1:])])})" if output.ndim else "()"


def _is_list_of(kind: type, output: Any) -> bool:
    return isinstance(output, (list, tuple)) and bool(output) and all(isinstance(part, kind) for part in output)


def _by_image(output: Any, count: int) -> bool:
    """Whether a list has one entry an image: dictionaries, or tensors that are no batches themselves."""
    if _is_list_of(Mapping, output):
        return True
    return (
        _is_list_of(torch.Tensor, output)
        and len(output) == count
        and not all(part.ndim > 0 and len(part) == count for part in output)
    )


def _leaves(output: Any, count: int | None = None, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All that is no container of parts, with its path. With ``count``, a list by image is one part."""
    if isinstance(output, Mapping):
        parts: Any = output.items()
    elif isinstance(output, (tuple, list)) and not (count is not None and _by_image(output, count)):
        parts = enumerate(output)
    else:
        yield path, output
        return
    for key, part in parts:
        yield from _leaves(part, count, (*path, key))


def _short(path: tuple[Any, ...]) -> Any:
    return path[0] if len(path) == 1 else path


def _at(path: tuple[Any, ...]) -> str:
    return f" at output={_short(path)!r}" if path else ""
