"""A network's output (a tensor, or a structure of tensors): reading a part of it, and cutting a batch into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from monai_saliency.errors import SettingError
from monai_saliency.utils.monai_private import tree_map
from monai_saliency.utils.tensors import plain

#: a key, an index, several of them from the outside in, or a function of the output
OutputPath: TypeAlias = "str | int | Sequence[str | int] | Callable[[Any], Any]"
_SHOWN = 12


def read(output: Any, path: OutputPath | None) -> Any:
    """Read the part of an output that is explained."""
    if path is None:
        return output
    if callable(path):
        return path(output)
    steps = (path,) if isinstance(path, (str, int)) else tuple(path)
    part = output
    for step in steps:
        try:
            if isinstance(part, torch.Tensor):
                # An index into a tensor would read one image of the batch instead of a part.
                raise TypeError("a tensor has no parts")
            part = part[step]
        except (KeyError, IndexError, TypeError):
            known = choices(output) or f"it is one {type(output).__name__}, so leave `output` out"
            raise SettingError(f"the network's output has no part {_short(steps)!r}: {known}") from None
    return part


def placed(part: Any, path: Sequence[str | int] | None) -> Any:
    """An output that has nothing but a part, where :func:`read` reads it by its path."""
    for step in reversed(path or ()):
        part = {step: part}
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
        at = f" at output={_short(path)!r}" if path else ""
        advice = "; choose another part by `output`" if path else ""
        if isinstance(part, torch.Tensor) and (part.ndim == 0 or len(part) != count):
            raise ValueError(
                f"the network gave an output of shape {tuple(part.shape)}{at} for a batch of {count} images; its first "
                f"axis must be the batch{advice}"
            )
        if _is_list_of(Mapping, part) and len(part) != count:
            raise ValueError(
                f"the network gave a list of {len(part)} dictionaries{at} for a batch of {count} images; it must have "
                f"one entry per image{advice}"
            )


def rows(output: Any, start: int, stop: int, count: int) -> Any:
    """The rows [start, stop) of an output for ``count`` images that :func:`check_rows` accepts."""
    if isinstance(output, torch.Tensor) or _by_image(output, count):
        return plain(output)[start:stop]  # of a MetaTensor, MONAI would take its meta data apart
    if isinstance(output, Mapping):
        return {key: rows(part, start, stop, count) for key, part in output.items()}
    if isinstance(output, (tuple, list)):
        return [rows(part, start, stop, count) for part in output]
    return output


def in_parts(count: int, most: int, least: int, call: Callable[[list[int]], Any]) -> Any:
    """One output for ``count`` images, by calls of ``least`` to ``most`` images. Each call is given the places of its
    images; the last image fills a call that has too few.
    """
    outputs = []
    for start in range(0, count, most):
        kept = min(most, count - start)
        size = max(kept, least)
        places = [min(place, count - 1) for place in range(start, start + size)]
        output = rows(call(places), 0, kept, size)
        outputs.append(tree_map(_cloned, output))  # the next call may overwrite it
    return _joined(outputs, min(most, count))


def _cloned(value: Any) -> Any:
    """A plain copy of a tensor, of which white-box methods take the derivative. Anything else is returned unchanged."""
    return plain(value).clone() if isinstance(value, torch.Tensor) else value


def _joined(outputs: Sequence[Any], count: int) -> Any:
    """One output for all images of several batches, the first of ``count`` images: the opposite of :func:`rows`."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: _joined([output[key] for output in outputs], count) for key in first}
    if _by_image(first, count):
        return [image for output in outputs for image in output]
    if isinstance(first, (tuple, list)):
        return [_joined(parts, count) for parts in zip(*outputs, strict=True)]
    return first


def num_rows(output: Any) -> int:
    """The number of images in the batch of an output; 0 where the output does not show it."""
    if _is_list_of(Mapping, output):
        return len(output)
    for _, part in _leaves(output):
        if isinstance(part, torch.Tensor) and part.ndim:
            return len(part)
    return 0


def choices(output: Any) -> str:
    """The possible values of ``output`` for a structured output, with the shape that each reads, and a bundle's flag,
    for messages; empty for one tensor.
    """
    paths = [(path, part) for path, part in _leaves(output) if path and isinstance(part, torch.Tensor)]
    if not paths:
        return ""
    words = ", ".join(f"output={_short(path)!r} reads {shape(part)}" for path, part in paths[:_SHOWN])
    steps = paths[0][0]
    flag = steps[0] if len(steps) == 1 else f'"{list(steps)}"'
    return f"{words} (in a bundle --saliency_output {flag})"


def shape(output: torch.Tensor) -> str:
    """A tensor's shape as text, with B for the batch axis: ``"(B, 3, 64, 64)"``."""
    if not output.ndim:
        return "()"
    sizes = ["B", *map(str, output.shape[1:])]
    return f"({', '.join(sizes)})"


def _is_list_of(kind: type, output: Any) -> bool:
    """Whether an output is a list of one or more parts of a kind."""
    if not isinstance(output, (list, tuple)) or not output:
        return False
    return all(isinstance(part, kind) for part in output)


def _by_image(output: Any, count: int) -> bool:
    """Whether a list has one entry per image: dictionaries, or tensors that are not batches themselves."""
    if _is_list_of(Mapping, output):
        return True
    if not _is_list_of(torch.Tensor, output) or len(output) != count:
        return False
    return any(part.ndim == 0 or len(part) != count for part in output)


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
