"""What the processes of ``ddp`` do: run as a script by ``test_lightning.py``, and by Lightning once more a process."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from helpers.own_bundle import explain_cohorts
from helpers.own_pipeline import Network, inferer, loader
from monai_saliency.distributed.lightning import SaliencyModule

SETTINGS: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp", "logger": False, "enable_checkpointing": False}
SETTINGS |= {"enable_progress_bar": False, "enable_model_summary": False}


def main(folder: Path, devices: int) -> None:
    seed_everything(len(sys.argv))  # which no mask depends on
    found: dict[str, Any] = {}

    def predict(name: str, split: str, data: Any, shared: bool) -> None:
        trainer = Trainer(devices=devices, use_distributed_sampler=shared, **SETTINGS)
        found[name] = trainer.predict(SaliencyModule(Network(), inferer(), split), data)
        found["rank"], found["world_size"] = trainer.global_rank, trainer.world_size

    predict("cases", "cases", loader(5), True)
    predict("masks", "masks", loader(5), False)
    predict("masks of one", "masks", loader(1), False)
    predict("masks of batches", "masks", loader(5, batch_size=3, num_workers=1), False)
    try:
        predict("masks shared", "masks", loader(5), True)
    except ValueError as error:
        found["masks shared"] = str(error)
    torch.save(found, folder / f"{found['rank']}.pt")
    engine = {
        "_target_": "monai_saliency.distributed.lightning.LightningEngine",
        "accelerator": "cpu",
        "devices": devices,
    }
    explain_cohorts(folder, engine)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
