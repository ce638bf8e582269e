"""Writes the boxes of all images to one JSON file."""

import json
from pathlib import Path

import numpy as np
from ignite.engine import Events


class DetectionSaver:
    def __init__(self, path, postprocessing):
        self.path = Path(path)
        self.postprocessing = postprocessing
        self.found = []

    def attach(self, engine):
        """Register with an evaluator."""
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.read)
        engine.add_event_handler(Events.COMPLETED, self.write)

    def read(self, engine):
        """Take over an iteration's boxes."""
        for item in engine.state.output:
            boxes = self.postprocessing({**item["pred"], "image": item["image"]})
            self.found.append({key: np.asarray(boxes[key]).tolist() for key in ("box", "label", "label_scores")})

    def write(self, engine):
        """Write all boxes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found))
