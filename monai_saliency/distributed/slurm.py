"""The tasks of a SLURM job array, and the processes that ``srun`` starts in each."""

from __future__ import annotations

import os

from monai_saliency.distributed.base import RankEngine


class SlurmEngine(RankEngine):
    """The share of this process in a SLURM job: the tasks of a job array, and the processes of each task.

    With an array of a tasks and n processes in each, process i of task t is number ``t * n + i`` of ``a * n``. Tasks
    do not wait for each other, and may run at any time on any node. Outside of SLURM it is the plain run.

    Args:
        split: what the processes share, see :class:`~monai_saliency.distributed.RankEngine`.

    Raises:
        ValueError: when the array's indices are not evenly spaced, so that no task knows how many come before it.
    """

    def __init__(self, split: str = "auto") -> None:
        task, tasks = _number("ARRAY_TASK_ID", 0), _number("ARRAY_TASK_COUNT", 1)
        first, last = _number("ARRAY_TASK_MIN", 0), _number("ARRAY_TASK_MAX", 0)
        step = _number("ARRAY_TASK_STEP", 1)
        if (last - first) // step + 1 != tasks:
            raise ValueError(
                f"an array shares a cohort where its indices are evenly spaced, as in --array=0-{tasks - 1}: got "
                f"{tasks} tasks from {first} to {last}. To repeat some tasks, submit the whole array: what is done is "
                "not done again"
            )
        # srun starts the processes of a step; the batch script itself is one process, whatever the job requested.
        processes = _number("STEP_NUM_TASKS", 1) if "SLURM_STEP_ID" in os.environ else 1
        process = _number("PROCID", 0) if processes > 1 else 0
        super().__init__((task - first) // step * processes + process, tasks * processes, split)


def _number(name: str, default: int) -> int:
    """The number that SLURM gives this process in a variable."""
    return int(os.environ.get(f"SLURM_{name}", default))
