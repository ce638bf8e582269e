"""Results of benchmarks, kept with what they were measured on: ``results/*.json`` beside this file.

    python tests/benchmarks/overhead.py --keep             # results/overhead.json
    python tests/benchmarks/peers.py --keep light          # results/peers_light.json
    python tests/benchmarks/record.py [NAME ...]           # tables of what is kept, in Markdown

Each file holds the benchmark's name, its settings, the machine (processor, cores, versions; no names of hosts or users)
and the rows of figures.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from monai.networks.nets import DenseNet

RESULTS = Path(__file__).parent / "results"

_PACKAGES = ("torch", "monai", "numpy")


def machine(device: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What figures were measured on, with the versions of torch, MONAI, NumPy and other packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    known = platform.processor() or platform.machine()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), known)
    versions = {package: importlib.metadata.version(package) for package in (*_PACKAGES, *packages)}
    used = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    found = gpu() if device.startswith("cuda") else {"device": cpu}
    return {**found, **used, "python": platform.python_version(), **versions}


def gpu() -> dict[str, Any]:
    """The name of the GPU, its memory, and what drives it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    known = {"GiB": round(torch.cuda.get_device_properties(0).total_memory / 2**30), "driver": driver}
    return {"device": torch.cuda.get_device_name(), **known, "cuda": torch.version.cuda}


def now(device: str) -> float:
    """The clock in seconds, once the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def resident_peak() -> float:
    """The largest resident memory of this program so far, in MiB; ``ru_maxrss`` counts what its parent held too."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    found = next((line.split()[1] for line in lines if line.startswith("VmHWM")), None)
    return (int(found) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024


def add_inside(parser: argparse.ArgumentParser) -> None:
    """Add the flag that :func:`apart` gives: ``args.inside`` is then the list of its arguments, and None elsewhere."""
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)


def apart(script: str, *arguments: Any) -> Any:
    """The last line, JSON, that a benchmark's file prints in a process of its own, whose memory nobody has used."""
    command = [sys.executable, script, "--inside", json.dumps(arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(script).name} failed for {arguments}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags ``--json FILE`` and ``--keep [LABEL]``."""
    parser.add_argument("--json", "--output", type=Path, help="write settings, machine and figures to a file")
    parser.add_argument(
        "--keep", nargs="?", const="", metavar="LABEL", help=f"the same, to {RESULTS.name}/ beside this"
    )


def keep(args: argparse.Namespace, benchmark: str, rows: Sequence[Any], packages: Sequence[str] = ()) -> list[Path]:
    """Write figures to the files that :func:`add_options` asks for; arguments with a value are the settings."""
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "keep", "inside")}
    settings = {name: value for name, value in settings.items() if value is not None and not isinstance(value, Path)}
    made = {"benchmark": benchmark, "settings": settings, "machine": machine(getattr(args, "device", "cpu"), packages)}
    paths = [args.json] if args.json is not None else []
    if args.keep is not None:
        paths.append(RESULTS / f"{'_'.join(filter(None, [benchmark, args.keep]))}.json")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**made, "rows": list(rows)}, indent=1) + "\n")
    return paths


def light(dims: int) -> torch.nn.Module:
    """A network whose forwards cost little, of three channels and classes."""
    torch.manual_seed(0)
    return DenseNet(dims, 3, 3, init_features=8, growth_rate=8, block_config=(2, 2), bn_size=2).eval()


def trained(network: torch.nn.Module, name: str, loss: Callable[[int], torch.Tensor], steps: int, rate: float) -> Any:
    """A network that is trained by the loss of each step, the first time; its weights stay in the temporary folder."""
    path = Path(tempfile.gettempdir()) / f"monai_saliency_{name}_{steps}.pt"
    if path.exists():
        network.load_state_dict(torch.load(path, weights_only=True))
        return network.eval()
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        schedule.step()
    torch.save(network.state_dict(), path)
    return network.eval()


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(_cell(row.get(name)) for name in columns)} |" for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def tables(names: Sequence[str] = (), folder: Path = RESULTS) -> str:
    """What is kept, as Markdown: a heading, the settings, the machine, and a table for each file (all by default)."""
    parts = []
    for path in [folder / f"{name}.json" for name in names] or sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        heads = [f"## {path.stem}", _cell(found["settings"]), _cell(found["machine"])]
        parts.append("\n\n".join([*heads, markdown(found["rows"])]))
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="such as overhead")
    print(tables(parser.parse_args().names))


if __name__ == "__main__":
    main()
