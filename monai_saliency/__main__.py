"""The command line, ``python -m monai_saliency COMMAND``.

``overlay NAME`` prints the path of a config to add to a bundle's, ``methods`` lists the methods and their settings,
``report FOLDER`` makes pages to look at of an output folder, ``report A B --output_dir DIR`` of several beside each
other, ``compare A B`` reports how the maps of two runs differ,
and ``gather SWEEP_DIR`` makes a table and a plot of a sweep. ``command`` prints the command of
``bundle/slurm/explain.sbatch``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from monai_saliency import methods
from monai_saliency.bundle.chosen_method import describe
from monai_saliency.bundle.command import from_environment
from monai_saliency.bundle.configs import overlay_path, overlays
from monai_saliency.bundle.sweep import gather
from monai_saliency.errors import OutputError
from monai_saliency.metrics.agreement import compare
from monai_saliency.visualize.report import write_comparison, write_report

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: the words of the command; those of the command line by default.

    Raises:
        SystemExit: with status 2 when the words are wrong, and with status 1 when maps differ, a sweep is not complete,
            or the command cannot be carried out.

    Example::

        >>> main(["overlay", "explain"])  # doctest: +ELLIPSIS
        /...explain.yaml
    """
    parser = argparse.ArgumentParser(prog="python -m monai_saliency", description="Saliency maps for MONAI models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("overlay", help="print the path of a config for the --config_file list of a bundle")
    command.add_argument("name", choices=overlays(), metavar="NAME", help=f"one of: {', '.join(overlays())}")
    command.set_defaults(run=_overlay)

    command = commands.add_parser("methods", help="list the methods and their settings, which are flags of a bundle")
    command.add_argument("names", nargs="*", metavar="NAME", help="a method, or the dotted path of your own")
    command.set_defaults(run=_methods)

    command = commands.add_parser("report", help="make the report of an output folder, and print the path of its page")
    command.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="the output folder of a run; of several runs to compare them with the first in one report",
    )
    command.add_argument("--output_dir", metavar="DIR", help="where the report of several runs goes")
    command.set_defaults(run=_report)

    command = commands.add_parser("compare", help="report how the maps of two output folders differ")
    command.add_argument("first", metavar="A", help="the output folder of a run")
    command.add_argument("second", metavar="B", help="the output folder of another run over the same cohort")
    command.add_argument(
        "--tolerance",
        type=float,
        default=1e-6,
        help="the largest difference, relative to the largest absolute value of A's map, that ends with status 0",
    )
    command.set_defaults(run=_compare)

    command = commands.add_parser("gather", help="make one table and one plot of the settings of a sweep")
    command.add_argument("sweep_dir", metavar="SWEEP_DIR", help="the folder with a folder for each setting")
    command.add_argument(
        "--reference",
        metavar="SETTING",
        help="the folder with whose maps the others' are compared; by default the one with the most forwards a case",
    )
    command.set_defaults(run=_gather)

    command = commands.add_parser("command", help="print the command of bundle/slurm/explain.sbatch, which asks for it")
    command.add_argument("words", nargs="*", metavar="-- --ID VALUE", help="further flags of the bundle")
    command.set_defaults(run=_command)

    parsed = parser.parse_args(arguments)
    try:
        done = parsed.run(parsed)
    except (ValueError, OutputError) as error:
        sys.exit(f"error: {error}")
    if not done:
        sys.exit(1)


def _overlay(parsed: argparse.Namespace) -> bool:
    print(overlay_path(parsed.name))
    return True


def _methods(parsed: argparse.Namespace) -> bool:
    print("\n".join(describe(name) for name in parsed.names or methods.__all__))
    return True


def _command(parsed: argparse.Namespace) -> bool:
    try:
        words = from_environment(os.environ, parsed.words)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(shlex.join(words))
    return True


def _report(parsed: argparse.Namespace) -> bool:
    if len(parsed.folders) > 1 and parsed.output_dir is None:
        raise ValueError("several runs are compared in a folder of their own: give --output_dir DIR")
    if len(parsed.folders) == 1 and parsed.output_dir is not None:
        raise ValueError("--output_dir is for several runs: the report of one run goes into its own folder")
    several = parsed.output_dir is not None
    print(write_comparison(parsed.folders, parsed.output_dir) if several else write_report(parsed.folders[0]))
    return True


def _compare(parsed: argparse.Namespace) -> bool:
    comparison = compare(parsed.first, parsed.second)
    print(comparison)
    return comparison.agrees(parsed.tolerance)


def _gather(parsed: argparse.Namespace) -> bool:
    sweep = gather(parsed.sweep_dir, parsed.reference)
    written = sweep.write(parsed.sweep_dir)
    print(sweep)
    print("written: " + ", ".join(map(str, written)))
    return sweep.complete


if __name__ == "__main__":
    main()
