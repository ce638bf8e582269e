"""The tasks of a SLURM job array, and the processes that ``srun`` starts in each."""

from __future__ import annotations

import os
from collections.abc import Mapping

from monai_saliency.distributed.base import RankEngine

__all__ = ["SlurmEngine"]


class SlurmEngine(RankEngine):
    """The share of this process in a SLURM job: the tasks of a job array, and the processes of each task.

    With an array of a tasks and n processes in each, process i of task t is number ``t * n + i`` of ``a * n``. Tasks
    do not wait for each other, and may run at any time on any node. Outside of SLURM it is the plain run.

    Args:
        split: what the processes share, see :class:`~monai_saliency.distributed.RankEngine`.
        environment: SLURM's variables; the environment of this process by default.

    Raises:
        ValueError: when the array's indices are not evenly spaced, so that no task knows how many come before it.
    """

    def __init__(self, split: str = "auto", environment: Mapping[str, str] = os.environ) -> None:
        def number(name: str, default: int) -> int:
            return int(environment.get(f"SLURM_{name}", default))

        task = number("ARRAY_TASK_ID", 0)
        first, last, step = (number(f"ARRAY_TASK_{name}", n) for name, n in (("MIN", 0), ("MAX", 0), ("STEP", 1)))
        tasks = number("ARRAY_TASK_COUNT", 1)
        if (last - first) // step + 1 != tasks:
            raise ValueError(
                f"an array shares a cohort where its indices are evenly spaced, as in --array=0-{tasks - 1}: got "
                f"{tasks} tasks from {first} to {last}. To repeat some tasks, submit the whole array: what is done is "
                "not done again"
            )
        # srun starts the processes of a step; the batch script itself is one process, whatever the job requested.
        processes = number("STEP_NUM_TASKS", 1) if "SLURM_STEP_ID" in environment else 1
        process = number("PROCID", 0) if processes > 1 else 0
        super().__init__((task - first) // step * processes + process, tasks * processes, split)
