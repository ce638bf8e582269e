"""What the processes of ``accelerate launch`` do: run as a script by ``test_accelerate.py``."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

from helpers.own_bundle import explain_cohorts
from helpers.own_pipeline import Network, inferer, loader
from monai_saliency.distributed.accelerate import explain_loader


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    rank, count = accelerator.process_index, accelerator.num_processes
    set_seed(5 + rank)  # which no mask depends on, and no order
    found: dict[str, Any] = {"rank": rank, "world_size": count, "written": {}}

    def explain(name: str, data: Any, split: str = "cases", by: Accelerator = accelerator, **more: Any) -> None:
        network, prepared = by.prepare(Network(), data) if split == "cases" else (Network(), data)
        try:
            found[name] = explain_loader(by, prepared, network, inferer(), split, **more)
        except ValueError as error:
            found[name] = str(error)
        # Afterwards the loader is as it was: each process has as many batches, some twice.
        if "wrong" not in name:
            steps = accelerator.gather(torch.tensor([len(list(prepared))]))
            assert len(set(steps.tolist())) == 1, name

    def write(name: str) -> Any:
        return lambda row: found["written"].setdefault(name, []).append((row["case"], row["saliency"].as_tensor()))

    for split in ("cases", "masks"):
        explain(f"{split} by 2", loader(5, batch_size=2), split)
        explain(f"{split} by 2 of one", loader(1, batch_size=2), split)
        explain(f"{split} written", loader(5), split, write=write(split))
        explain(f"{split} without the last", loader(5, batch_size=2, drop_last=True), split)
    even = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    explain("split batches", loader(2 * count + 1, batch_size=count), by=even)
    sent = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    explain("wrong: dispatched", loader(5), by=sent)
    explain("cases shuffled", loader(5, shuffle=True))
    torch.save(found, folder / f"{rank}.pt")
    explain_cohorts(folder, {"_target_": "monai_saliency.distributed.accelerate.AccelerateEngine"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
