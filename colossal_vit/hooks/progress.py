"""The progress bar."""

from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.hooks.metrics import writes_metrics
from colossal_vit.hooks.priority import Priority
from colossal_vit.run import Run
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor
from tqdm import tqdm


class ProgressHook(BaseHook):
    """A progress bar over the optimizer steps of the run, with the time left, if stderr is a terminal.

    Args:
        run: from `main.start`.
        train_dataloader: as `engine.initialize` returned it.
    """

    def __init__(self, run: Run, train_dataloader: TrainLoader):
        super().__init__(Priority.READER)
        self.run, self.train_dataloader = run, train_dataloader

    def before_train(self, trainer: Trainer) -> None:
        steps = self.run.config.NUM_EPOCHS * (len(self.train_dataloader) // trainer.engine.accumulation)
        self.bar = tqdm(
            total=min(steps, self.run.args.max_steps or steps),
            initial=trainer.engine.num_steps,
            unit="step",
            dynamic_ncols=True,
            disable=None if writes_metrics() else True,  # None: unless stderr is a terminal
        )

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if not self.bar.disable:
            if records := trainer.states["records"]:
                last = records[-1]
                said = f"epoch {last['epoch']}, loss {last['loss']:.4f}, {last['images_per_s']:.0f} images/s"
                self.bar.set_postfix_str(said, refresh=False)
            self.bar.update()

    def after_train(self, trainer: Trainer) -> None:
        self.bar.close()
