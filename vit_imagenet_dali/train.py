"""Train a Vision Transformer on ImageNet-1K with a global batch of 32K images, read by DALI from TFRecords.

    torchrun --standalone --nproc_per_node 4 train.py --config ./config.py

`build_tfrecords.py` makes the TFRecords. Data parallel: every process holds the whole model.
"""

from colossal_vit.data.loaders import load_data
from colossal_vit.engine import Trainer, Training, build_criterion, build_optimizer, build_scheduler, initialize
from colossal_vit.hooks import standard_hooks
from colossal_vit.main import Arguments, Run, Script, start
from colossal_vit.model import timm_vit
from colossal_vit.model.timm_vit import build_timm_vit, check_timm_vit, describe_timm_vit

import mixup
import planning
from mixup import with_mixup
from myhooks import ThroughputHook
from planning import schedule


def build(run: Run) -> Training:
    """Build what trains. `main` calls it, and so does whatever looks at a training, such as `--dry-run`."""
    config = run.config

    # ---- Data: DALI reads TFRecords --------------------------------------------------------------------------------
    train_dataloader, test_dataloader = load_data(run)
    train_dataloader = with_mixup(train_dataloader, config)  # Mixup and CutMix, with the block `mix`

    # ---- Model -----------------------------------------------------------------------------------------------------
    model = build_timm_vit(config)
    run.log.info(describe_timm_vit(config, model))

    # ---- Criterion, optimizer, learning rate -----------------------------------------------------------------------
    criterion = build_criterion(config)  # takes classes and mixed targets
    optimizer = build_optimizer(config, model)
    lr_scheduler = build_scheduler(config, optimizer, len(train_dataloader) // config.gradient_accumulation)

    # ---- Engine: precision, gradient reduction, accumulation, as the config says -----------------------------------
    return initialize(model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler)


def main(args: Arguments) -> object:
    # ---- Launch: colossalai.launch_from_torch, _slurm, _openmpi or launch, by launch_groups in launch/groups.py ----
    run = start(args)

    engine, train_dataloader, test_dataloader, lr_scheduler = build(run)

    # ---- Train, from the newest checkpoint on if there is one ------------------------------------------------------
    trainer = Trainer(engine, lr_scheduler, run.log)
    run.checkpointer.load(trainer, train_dataloader)
    hooks = standard_hooks(run, train_dataloader)
    if args.eval_only:
        return trainer.evaluate(test_dataloader, hooks=hooks)
    hooks.append(ThroughputHook(engine.bare_model, run.device, run.log))
    trainer.fit(
        train_dataloader,
        epochs=run.config.NUM_EPOCHS,
        max_steps=args.max_steps,
        test_dataloader=test_dataloader,
        hooks=hooks,
    )
    run.log.info(f"metrics, curves and checkpoints are in {run.output}")


SETTINGS = {**timm_vit.SETTINGS, **mixup.SETTINGS, **planning.SETTINGS}
SCRIPT = Script(main, build, __doc__, SETTINGS, check_timm_vit, schedule, loader="imagenet_dali_dataloader.py")

if __name__ == "__main__":
    SCRIPT.run()
