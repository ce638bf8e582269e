"""A transform that takes its time and says so in a file, so that a run can be met in the middle of it."""

import os
import time
from pathlib import Path
from typing import Any

from monai.transforms import Transform


class Moment(Transform):
    """Writes the file ``path``, and waits, where that is not there yet or the process is another one."""

    def __init__(self, path: str, seconds: float) -> None:
        self.path = path
        self.seconds = seconds

    def __call__(self, data: Any) -> Any:
        if self.seconds:
            Path(self.path).write_text(str(os.getpid()))
            time.sleep(self.seconds)
        return data
