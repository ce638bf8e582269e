"""An evaluator of lists of images."""

from monai.engines import SupervisedEvaluator
from monai.engines.utils import IterationEvents


def prepare_images(batch, device=None, non_blocking=False, **kwargs):
    """The images of a batch that is not collated."""
    return [item["image"].to(device=device, non_blocking=non_blocking, **kwargs) for item in batch], None


class DetectionEvaluator(SupervisedEvaluator):
    def __init__(self, device, val_data_loader, network, prepare_batch=prepare_images, **kwargs):
        super().__init__(device, val_data_loader, network, prepare_batch=prepare_batch, **kwargs)

    def _register_decollate(self):
        @self.on(IterationEvents.MODEL_COMPLETED)
        def by_image(engine):
            output = {key: value for key, value in engine.state.output.items() if value is not None}
            engine.state.output = [
                {key: value[i] for key, value in output.items()} for i in range(len(output["image"]))
            ]
