"""The listing of images and their densities."""

import json


class CreateImageLabelList:
    """Reads a JSON file: section -> list of [image, one-hot label]."""

    def __init__(self, filename):
        with open(filename, encoding="utf-8") as file:
            self.listing = json.load(file)

    def create_dataset(self, section):
        """Images and labels of a section."""
        images, labels = zip(*self.listing[section], strict=True)
        return list(images), list(labels)
