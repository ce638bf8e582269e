"""Explaining what an evaluator or a loop predicts, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monai_saliency.bundle.attach_settings import AttachSettings
from monai_saliency.bundle.attached_handler import AttachedHandler
from monai_saliency.bundle.loop import Loop, LoopExplainer
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.monai_private import event_handlers, postprocessing_of


def attach(
    evaluator: Any,
    output_dir: str | Path,
    *,
    loader: Any = None,
    inferer: Any = None,
    postprocessing: Any = None,
    **settings: Any,
) -> Any:
    """Explain each case that a MONAI evaluator, or a loop or predict step of your own, predicts, right after its
    forward. The predictions stay what they are.

    This is what ``configs/explain.yaml`` does to the evaluator of a bundle, for what is made in Python. The maps are
    the same, byte for byte.

    Args:
        evaluator: what predicts:

            - an evaluator with a network and an inferer, such as MONAI's ``SupervisedEvaluator``. Its inferer is
              replaced by one that also records its calls;
            - the network of a loop, in evaluation mode: any callable on batches ``(B, C, *spatial)``. The loop may be
              the predict step of a Lightning module.
        output_dir: the folder for maps, pictures, ``summary.csv``, ``failures.csv`` and scores.
        loader: of a loop: gives its batches. Its dataset has the files' names and the preprocessing; without it maps
            lie on the grid of the network's input.
        inferer: of a loop: what calls the network.
        postprocessing: of a loop: the transform of its predictions, by whose activation they are explained, unless
            ``activation`` is given.
        settings: what is explained, and how: see
            :class:`~monai_saliency.bundle.attach_settings.AttachSettings`, such as ``method="rise"``, ``classes=[1]``
            or ``picture=False``, and the method's own.

    Returns:
        for an evaluator the handler: ``explained`` lists the cases with maps, and ``failures`` those without. For a
        loop what explains a batch, a :class:`~LoopExplainer`, with the handler as ``handler``.

    Raises:
        ValueError: when a setting is wrong, or the predictions cannot be explained, with the reason.

    Example::

        >>> import torch
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from monai.data import DataLoader, Dataset, MetaTensor
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        >>> loader = DataLoader(Dataset([{"image": MetaTensor(torch.rand(1, 4, 4, 4))}]), batch_size=1)
        >>> with TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     settings = {"activation": "softmax", "report": False, "picture": False}
        ...     with attach(network, folder, loader=loader, **settings) as explain:
        ...         for batch in loader:
        ...             explain(batch, network(batch["image"]))
        ...     len(list(Path(folder).glob("*_saliency.nii.gz")))
        monai_saliency: the loop (Loop) runs Sequential by SimpleInferer on image 'image' ...
        1
    """
    explaining, folder = AttachSettings.of(**settings), a_path("output_dir", output_dir)
    if hasattr(evaluator, "add_event_handler"):
        if any(given is not None for given in (loader, inferer, postprocessing)):
            raise ValueError("an evaluator has its own loader, inferer and postprocessing: give none")
        handler = attach_to(evaluator, folder, explaining, "the evaluator", postprocessing_of(evaluator))
        handler.report_at_end(evaluator)
        return handler
    loop = Loop(evaluator, inferer, loader)
    handler = attach_to(loop, folder, explaining, "the loop", postprocessing)
    return LoopExplainer(handler, loop)


def attach_to(
    evaluator: Any, folder: Path, settings: AttachSettings, words: str, postprocessing: Any
) -> AttachedHandler:
    """Attach the handler that explains to an evaluator, and detach those that explain already."""
    if not all(hasattr(evaluator, part) for part in ("network", "inferer")):
        raise ValueError(
            f"{words} is a {type(evaluator).__name__} without a network and an inferer: what can be explained is an "
            "evaluator with one of each, such as SupervisedEvaluator (--saliency_evaluator names the id of another "
            "one). Explain the members of an ensemble one by one, or make one network of them"
        )
    if type(evaluator.network).__name__ == "ModelnnUNetWrapper":
        raise ValueError(
            "MONAI's wrapper of nnU-Net gives labels, which show no gradual change: explain the model's own folder by "
            "our bundle with the overlay `nnunet`"
        )
    for event, function in event_handlers(evaluator):
        if isinstance(getattr(function, "__self__", function), SaliencyHandler):  # as our own bundle has one
            evaluator.remove_event_handler(function, event)
    handler = AttachedHandler(settings, words, evaluator, postprocessing, folder)
    handler.attach(evaluator)
    return handler
