"""A network's output (a tensor, or a structure of tensors): reading a part of it, and cutting a batch into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["OutputPath", "check_rows", "choices", "joined", "num_rows", "read", "rows", "shape"]

#: a key, an index, several of them from the outside in, or a function of the output
OutputPath: TypeAlias = "str | int | Sequence[str | int] | Callable[[Any], Any]"
_SHOWN = 12


def read(output: Any, path: OutputPath | None) -> Any:
    """Read the part of an output that is explained."""
    if path is None:
        return output
    if callable(path):
        return path(output)
    part = output
    for step in (path,) if isinstance(path, (str, int)) else path:
        try:
            if isinstance(part, torch.Tensor):
                # An index into a tensor would read one image of the batch instead of a part.
                raise TypeError("a tensor has no parts")
            part = part[step]
        except (KeyError, IndexError, TypeError):
            known = choices(output) or f"it is one {type(output).__name__}, so leave `output` out"
            raise ValueError(f"the network's output has no part {path!r}: {known}") from None
    return part


def check_rows(output: Any, count: int) -> None:
    """Refuse an output, or a part of one, that does not have one row for each of ``count`` images."""
    parts = list(_leaves(output, count))
    if not any(isinstance(part, (torch.Tensor, list, tuple)) for _, part in parts):
        raise ValueError(
            f"the network gave a {type(output).__name__} without tensors; give the inferer a function as `output` that "
            "reads tensors from it"
        )
    for path, part in parts:
        if isinstance(part, torch.Tensor) and (part.ndim == 0 or len(part) != count):
            what, should = f"an output of shape {tuple(part.shape)}", "its first axis must be the batch"
        elif _is_list_of(Mapping, part) and len(part) != count:
            what, should = f"a list of {len(part)} dictionaries", "it must have one entry per image"
        else:
            continue
        at, other = (f" at output={_short(path)!r}", "; choose another part by `output`") if path else ("", "")
        raise ValueError(f"the network gave {what}{at} for a batch of {count} images; {should}{other}")


def rows(output: Any, start: int, stop: int, count: int) -> Any:
    """The rows [start, stop) of an output for ``count`` images that :func:`check_rows` accepts."""
    if isinstance(output, torch.Tensor) or _by_image(output, count):
        return output[start:stop]
    if isinstance(output, Mapping):
        return {key: rows(part, start, stop, count) for key, part in output.items()}
    if isinstance(output, (tuple, list)):
        return [rows(part, start, stop, count) for part in output]
    return output


def joined(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    """One output for all images of several batches with ``counts`` images each, the opposite of :func:`rows`."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: joined([each[key] for each in outputs], counts) for key in first}
    if _by_image(first, counts[0]):
        return [entry for each in outputs for entry in each]
    if isinstance(first, (tuple, list)):
        return [joined(parts, counts) for parts in zip(*outputs, strict=True)]
    return first


def num_rows(output: Any) -> int:
    """The number of images in the batch of an output; 0 where the output does not show it."""
    if _is_list_of(Mapping, output):
        return len(output)
    return next((len(part) for _, part in _leaves(output) if isinstance(part, torch.Tensor) and part.ndim), 0)


def choices(output: Any) -> str:
    """The possible values of ``output`` for a structured output, with the shape that each reads, for messages."""
    found = [(path, part) for path, part in _leaves(output) if path and isinstance(part, torch.Tensor)]
    return ", ".join(f"output={_short(path)!r} reads {shape(part)}" for path, part in found[:_SHOWN])


def shape(output: torch.Tensor) -> str:
    """A tensor's shape as text, with B for the batch axis: ``"(B, 3, 64, 64)"``."""
    return f"({', '.join(['B', *map(str, output.shape[1:])])})" if output.ndim else "()"


def _is_list_of(kind: type, output: Any) -> bool:
    return isinstance(output, (list, tuple)) and bool(output) and all(isinstance(part, kind) for part in output)


def _by_image(output: Any, count: int) -> bool:
    """Whether a list has one entry per image: dictionaries, or tensors that are not batches themselves."""
    if _is_list_of(Mapping, output):
        return True
    return (
        _is_list_of(torch.Tensor, output)
        and len(output) == count
        and not all(part.ndim > 0 and len(part) == count for part in output)
    )


def _leaves(output: Any, count: int | None = None, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All innermost parts of an output, with their paths. With ``count``, a list with one entry per image is a part."""
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
