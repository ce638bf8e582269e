"""An evaluator that gives the network the classes to look for."""

from monai.engines import SupervisedEvaluator
from monai.engines.utils import IterationEvents
from monai.utils import CommonKeys


class PromptEvaluator(SupervisedEvaluator):
    def __init__(self, class_vector, **kwargs):
        super().__init__(**kwargs)
        self.class_vector = class_vector

    def _iteration(self, engine, batchdata):
        inputs, labels = engine.prepare_batch(batchdata, engine.state.device, engine.non_blocking)
        engine.state.output = {CommonKeys.IMAGE: inputs, CommonKeys.LABEL: labels}
        with engine.mode(engine.network):
            engine.state.output[CommonKeys.PRED] = engine.inferer(
                inputs=inputs, network=engine.network, class_vector=self.class_vector.to(inputs.device)
            )
        # With a first axis for decollating, as the prediction has.
        engine.state.output["label_prompt"] = self.class_vector[None, :, None]
        engine.fire_event(IterationEvents.FORWARD_COMPLETED)
        engine.fire_event(IterationEvents.MODEL_COMPLETED)
        return engine.state.output
