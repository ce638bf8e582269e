"""What is explained of an evaluator's predictions, and how: the settings of the overlay and of :func:`attach`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from monai.transforms import Compose

from monai_saliency.bundle.chosen_method import AUTO, ChosenMethod, choose_method
from monai_saliency.bundle.replay import own_inferer
from monai_saliency.distributed.base import Engine as SharingEngine
from monai_saliency.fills.named import fill_in_unit
from monai_saliency.handlers.trust import Trust
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods.settings import all_settings, find_method, own_settings
from monai_saliency.networks.inputs import ArgumentInputs
from monai_saliency.networks.runtime import check_runtime
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.targets import Target
from monai_saliency.targets.auto import AutoTarget
from monai_saliency.targets.postprocessing import read_postprocessing
from monai_saliency.transforms.writers import case_writers, writer_settings
from monai_saliency.utils.arguments import flag, refuse_unknown

#: where a case's label map is kept, since its own key comes to hold the label's file
REGIONS = "saliency_regions"
#: where a case holds what its network got
NETWORK_INPUT = "network_input"


@dataclass
class AttachSettings:
    """What is explained of an evaluator's predictions, and how.

    Args:
        image_key: the key of a batch that holds the network's input; found by its values by default.
        key: the key of the map, and the ending of its files' names.
        label_key: the key of a batch that holds label maps, for regions and targets that are made of them.
        within_key: the key of a batch that holds masks ``(B, 1, *spatial)``, such as of the brain: nothing else is
            perturbed, and maps are 0 there.
        target: ``"auto"`` (:class:`~monai_saliency.targets.auto.AutoTarget`) or a target.
        output: the part of the network's output that is explained.
        classes: of the automatic target.
        activation: of the automatic target.
        scale: of the automatic target: ``"probability"`` or ``"log_odds"``; by default the log-odds of a class, and
            the mean probability in a region.
        against: of the automatic target: a class that the others are explained against.
        method: the name of a function of :mod:`monai_saliency.methods`, or the dotted path of your own function; by
            default ``focused_rise``, or what has the settings that are given
            (:class:`~monai_saliency.bundle.chosen_method.choose_method`).
        fill: what hides a voxel: a number, a fill or its name, or ``"auto"``: chosen on the first three cases
            (:func:`~monai_saliency.inferers.choose_fill`).
        numbers: numbers that the evaluator gives its network by name, as MONAI's ``PrepareBatchExtraInput`` does, and
            that ``method="shapley"`` hides like regions: their names and baselines by argument, such as
            ``{"clinical": {"age": 62.0, "sex": 0.5}}`` (:class:`~monai_saliency.DictInput`).
        fill_unit: of a number: ``"network"`` for the network's input space, ``"scan"`` for the file's own.
        mask_batch_size: perturbed images in one batch, at the most; by default ``"auto"``, by the size of the image.
        amp: explain in half precision, ``"bf16"`` or ``"fp16"`` (:func:`~monai_saliency.networks.accelerated`); False
            explains in the evaluator's precision. Predictions stay what they are.
        channels_last: explain with images whose channels come last in memory, which convolutions may run faster.
        compile: explain with the network compiled by ``torch.compile``: True, a mode such as ``"reduce-overhead"``, or
            a dictionary of its arguments.
        seed_network: for networks that are random on purpose: the seed of torch's generators at each call
            (:class:`~monai_saliency.PerturbationInferer`).
        report: whether to make a report of the cohort at the end, ``report/index.html`` in the output folder
            (:func:`~monai_saliency.visualize.report.write_report`), and to keep what it shows in ``views/``.
        standard_error: whether to save a standard error with each map that has one, such as a RISE map: how far
            each voxel is off by the choice of masks. It is computed from the scores, without extra forwards, in about
            five times the time of rendering the masks.
        trust: whether to measure how far to trust each map, for ``summary.csv`` and a page ``trust.md``. It takes three
            times as many further forwards, and the forwards of insertion and deletion
            (:class:`~monai_saliency.handlers.trust.Trust`).
        trust_steps: perturbed images of each insertion and deletion curve.
        keeps_place: whether steps of the preprocessing that record nothing and are not MONAI's, and ``Lambdad``, change
            values only. Otherwise they may have moved voxels, and maps stay on the grid of the network's input.
        strict: raise the first failure instead of listing it.
        store_dir: the folder for scores, so that a stopped run resumes; by default ``scores`` in ``dir``; empty: none.
        network_id: a name for the network in the store, needed where it is not a module.
        engine: shares the cohort with other processes (:mod:`monai_saliency.distributed`).
        prefix: what precedes the settings' names in a config, for errors and warnings.
        others: settings of what is written (:func:`~monai_saliency.transforms.case_writers`), such as
            ``picture=False`` or ``dicom=True``; and the method's own, by default the method's own defaults, and 100
            supervoxels for ``region_occlusion`` without ``label_key``.

    Raises:
        ValueError: when a setting is wrong.
    """

    image_key: str | None = None
    key: str = "saliency"
    label_key: str | None = None
    within_key: str | None = None
    target: Target | str = "auto"
    output: str | int | Sequence[str | int] | None = None
    classes: Sequence[int] | str = "predicted"
    activation: str | None = None
    scale: str | None = None
    against: int | None = None
    method: str | Callable[..., PerturbationInferer] | None = None
    fill: float | str | Callable[[torch.Tensor], torch.Tensor] = "auto"
    fill_unit: str = "network"
    numbers: Mapping[str, Any] | None = None
    mask_batch_size: int | str = "auto"
    amp: str | bool | None = False
    channels_last: bool = False
    compile: bool | str | Mapping[str, Any] | None = False
    seed_network: int | None = None
    report: bool = True
    standard_error: bool = True
    trust: bool = False
    trust_steps: int = 20
    keeps_place: bool = False
    strict: bool = False
    store_dir: str | Path | None = None
    network_id: str | None = None
    engine: SharingEngine | None = None
    prefix: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **given: Any) -> AttachSettings:
        """Settings of what is written and of the method may be among the arguments."""
        own = {each.name for each in fields(cls)} & given.keys()
        return cls(**{name: given.pop(name) for name in own}, others=given)

    def __post_init__(self) -> None:
        self._check_target()
        # The scan's own unit needs the preprocessing, which is known at the first case.
        fill_in_unit(self.fill, self.fill_unit, Compose(), id=f"{self.prefix}fill")
        self.runtime = check_runtime(self.amp, self.channels_last, self.compile, self.prefix)
        for name in ("report", "standard_error", "keeps_place"):
            setattr(self, name, flag(f"{self.prefix}{name}", getattr(self, name)))
        self.measures = Trust(self.trust_steps) if flag(f"{self.prefix}trust", self.trust) else None
        self.inputs = ArgumentInputs("image", self.numbers) if self.numbers else None
        if self.inputs is not None and self.measures is not None:
            raise ValueError(f"`{self.prefix}trust` measures networks of an image alone: leave out `numbers`, or trust")
        self._written: dict[str, Any] = {"key": self.key, "image_key": NETWORK_INPUT, "report": self.report}
        self.method_settings: dict[str, Any] = {}
        for name, value in self.others.items():
            settings = self._written if name in writer_settings() else self.method_settings
            settings[name] = value
        self.writers(".")  # wrong settings are refused before the first forward
        self.chosen = self._chosen_method()

    def _check_target(self) -> None:
        """Refuse another word than ``"auto"``, and settings of the automatic target for a target of its own."""
        if self.target == "auto":
            return
        if isinstance(self.target, str):
            raise ValueError(f"`{self.prefix}target` must be 'auto' or a target, got {self.target!r}")
        if (self.classes, self.activation, self.scale, self.against) != ("predicted", None, None, None):
            names = [f"`{self.prefix}{name}`" for name in ("classes", "activation", "scale", "against")]
            raise ValueError(
                f"{', '.join(names)} are for the target 'auto': give them to {type(self.target).__name__} itself"
            )

    def _chosen_method(self) -> ChosenMethod:
        """The method. Of ``others``, settings that no method and no writer has are refused."""
        known = [setting.name for setting in fields(self)] + writer_settings() + all_settings()
        if self.method not in (None, AUTO):
            known += own_settings(find_method(self.method, f"{self.prefix}method"))
        refuse_unknown("attach", self.method_settings, dict.fromkeys(known))
        defaults = {}
        if self.label_key is None and self.method_settings.get("regions") is None:
            defaults["num_supervoxels"] = 100
        return choose_method(self.method, self.method_settings, defaults, self.prefix)

    def writers(self, folder: str | Path) -> Compose:
        """What is written of each case into a folder."""
        return case_writers(folder, **self._written)

    def inferer(self, evaluator: Any, postprocessing: Any) -> PerturbationInferer:
        """Explains what an evaluator predicts, but for what is known only at its first case: the fill, whose unit may
        be the scan's, and how its inferer is called.
        """
        target, output = self.target, self.output
        if isinstance(target, str):
            readings = read_postprocessing(postprocessing)
            target = AutoTarget(readings, self.classes, self.activation, self.output, self.scale, self.against)
            output = None
        made = self.chosen(
            target=target,
            fill=None,
            inferer=own_inferer(evaluator),
            mask_batch_size=self.mask_batch_size,
            progress=True,
            output=output,
            autocast=dict(evaluator.amp_kwargs) if evaluator.amp else None,
        )
        further = {"inputs": self.inputs, "seed_network": self.seed_network}
        return made.replace(**{name: value for name, value in further.items() if value is not None})

    def store(self, folder: Path) -> ScoreStore | None:
        """The scores that are kept, for maps in a folder."""
        if self.store_dir is None:
            return ScoreStore(folder / "scores")
        return ScoreStore(self.store_dir) if str(self.store_dir) else None
