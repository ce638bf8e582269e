"""Which method for the network of a bundle: the run ``compare_methods``, on the first cases of its cohort."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from monai_saliency.bundle.chosen_method import ChosenMethod
from monai_saliency.errors import SettingError
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods.settings import SHARED, find_method, own_settings
from monai_saliency.metrics.truth import LEAST, Scan
from monai_saliency.metrics.which_method import COLUMNS, FIGURES, Comparison, default_methods, named
from monai_saliency.networks.identity import network_key
from monai_saliency.storage.files import locked, write_whole
from monai_saliency.storage.key import Unfingerprintable, fingerprint
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import CaseTable, refuse_foreign, write_csv
from monai_saliency.utils.arguments import refuse_unknown, whole_number
from monai_saliency.visualize.report.methods import draw_map, write_methods

_COLUMNS = ["method", "cases", *(name + end for name in FIGURES for end in ("", "_error")), "problem"]
# Scans that are loaded for each case that is asked for, while few have a label.
_READ = 20


class MethodChoice:
    """Compares methods on the first cases of a cohort (:func:`~monai_saliency.metrics.compare_methods`).

    The folder gets ``methods.csv`` with a row for each method and control, the page ``report/methods.html``,
    ``methods_cases.csv`` with the figures of each case, from which a stopped comparison goes on, the scores in
    ``methods_scores``, and in ``method.json`` the method to take, also where none is recommended, which is no reason to
    have no maps at all (:attr:`MethodComparison.taken <monai_saliency.metrics.MethodComparison.taken>`). A comparison
    that was killed runs again what was under way (a batch; all of a gradient method, of which no score is kept), and of
    each scan a first batch, to tell that the scores on disk are of this network.

    Args:
        folder: of what is written.
        cases: how many cases, at least 3: those with a label where cases have one, and as many others.
        methods: names, or dictionaries of a method with its settings; None for the default ones.
        defaults: of settings, by id.
        prefix: of the ids of settings, for the command that is printed last.
    """

    #: take the method that was found before, see :func:`~monai_saliency.bundle.config.best_method`
    once = False

    def __init__(
        self,
        folder: str | Path,
        cases: int = 8,
        methods: Sequence[str | Mapping[str, Any]] | None = None,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self.folder, self.prefix, self.defaults = Path(folder), prefix, defaults
        self.cases = whole_number(f"{prefix}compare_cases", cases, LEAST)
        self.given = named(methods or [])
        self.chosen: dict[str, Any] | None = None
        for own in self.given.values():
            self.method(own)  # a misspelt one is refused before anything runs

    def method(self, settings: Mapping[str, Any]) -> ChosenMethod:
        """A method with its settings."""
        own = {id: value for id, value in settings.items() if id != "method"}
        refuse_unknown(str(settings["method"]), own, own_settings(find_method(settings["method"])))
        return ChosenMethod(settings["method"], own, self.defaults, self.prefix)

    def __call__(
        self, inferer: PerturbationInferer, network: Any, scans: Iterable[Scan], network_id: str | None = None
    ) -> None:
        """Compare methods by the settings of an inferer, print the table, and what to run next. One of several
        processes does so; ``once`` what it has found is taken.
        """
        with locked(self.folder / ".methods.lock"):
            scans = iter(scans)
            first = list(itertools.islice(scans, 1))
            names_and_shapes = [(scan.case.name, scan.image.shape) for scan in first]
            key, kept = self._key(inferer, network, network_id, names_and_shapes), self._kept()
            if self.once and key and kept.get("key") == key:
                self.chosen = kept["method"]
                self._say(kept, "measured before")
            else:
                self._compare(inferer, network, self._first(itertools.chain(first, scans)), network_id, key)

    def _key(self, inferer: PerturbationInferer, network: Any, network_id: str | None, first: Any) -> str:
        """What decides which method is best, but for the voxels; empty where that is not known. The name and shape of
        the ``first`` scan, which is always measured, tell one cohort from another.
        """
        try:
            settings = [*inferer.deciding.values(), self.given, self.defaults, self.cases, first]
            return fingerprint([network_key(network, network_id, kept=True), *settings])
        except Unfingerprintable:
            return ""

    def _kept(self) -> dict[str, Any]:
        """What an earlier comparison has found; empty without one. A SettingError where a file is not ours."""
        refuse_foreign(self.folder / "methods.csv", _COLUMNS)
        path = self.folder / "method.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"key": "", "method": {}}
        except ValueError:
            kept = None
        if not isinstance(kept, dict) or not {"key", "method"} <= kept.keys():
            raise SettingError(f"{path} is not of a comparison of methods, and is left as it is: move it away")
        return kept

    def _say(self, kept: Mapping[str, Any], when: str) -> None:
        """Print the method that is taken, and from which scans."""
        scans = f"{len(kept['cases'])} scans ({', '.join(kept['cases'])})"
        print(f"\nmethod auto: {kept['taken']}, {when} on {scans}, see {self.folder / 'methods.csv'}", flush=True)

    def _compare(
        self, inferer: PerturbationInferer, network: Any, chosen: list[Scan], network_id: str | None, key: str
    ) -> None:
        if len(chosen) < LEAST:
            raise ValueError(f"methods are compared on at least {LEAST} cases, the cohort has {len(chosen)} to load")
        has_regions = chosen[0].case.labels is not None
        settings = self.given or named(default_methods(chosen[0].image.shape[1:], has_regions))
        shared = {name: inferer.settings[name] for name in SHARED - {"masks", "estimator"}}
        inferers = {name: self.method(own)(**shared) for name, own in settings.items()}
        store = ScoreStore(self.folder / "methods_scores")
        table = CaseTable(self.folder / "methods_cases.csv", COLUMNS)
        say = partial(print, file=sys.stderr, flush=True)
        found = Comparison(inferers, network, settings, store, network_id, table, say, show=self._show).run(chosen)
        write_csv(self.folder / "methods.csv", _COLUMNS, found.summary)
        self.chosen = {"method": "focused_rise"} if found.taken is None else settings[found.taken]
        kept = {"key": key, "method": self.chosen, "verdict": found.verdict, "truth": found.truth}
        why = "" if found.best else f"{found.verdict}. All the same each case is explained by "
        kept |= {"taken": f"{why}{found.taken or 'the default'}", "cases": [scan.case.name for scan in chosen]}
        write_whole(self.folder / "method.json", json.dumps(kept, indent=1, default=str))
        print(f"\n{found}", flush=True)
        print(f"\n{write_methods(self.folder, found)}", flush=True)
        if self.once:
            self._say(kept, "measured now")
        elif found.best is not None:
            print(f"\n{next_command(found.best, self.prefix)}", flush=True)

    def _show(self, scan: Scan, name: str, saliency: torch.Tensor) -> None:
        draw_map(self.folder, scan.case.name, "scan", scan.image.mean(0), scan.label)
        draw_map(self.folder, scan.case.name, name, saliency, scan.label)

    def _first(self, scans: Iterable[Scan]) -> list[Scan]:
        """The first cases with a label, and as many without."""
        labelled: list[Scan] = []
        others: list[Scan] = []
        for scan in itertools.islice(scans, _READ * self.cases):
            if scan.label is not None and scan.label.any():
                labelled.append(scan)
            elif len(others) < self.cases:
                others.append(scan)
            if len(labelled) == self.cases or (scan.label is None and len(others) >= self.cases):
                break
        return labelled + others


def next_command(best: str, prefix: str) -> str:
    """The command of this run, with the method that is best in the place of what was compared."""
    method = shlex.split(best)
    flags = [f"--{prefix}method", method[0], *(word.replace("--", f"--{prefix}", 1) for word in method[1:])]
    words = sys.argv[1:]
    if "compare_methods" not in words:
        return shlex.join(flags)
    words[words.index("compare_methods")] = "explain" if prefix else "run"
    ours = ("compare_cases", "compared_methods", "method")
    for id in [f"--{prefix}{name}" for name in ours]:
        while id in words:
            del words[words.index(id) : words.index(id) + 2]
    return shlex.join(["python", "-m", "monai.bundle", *words, *flags])
