"""Train a timm Vision Transformer on CIFAR-10, data parallel.

    torchrun --standalone --nproc_per_node 4 train_dp.py --config ./configs/config_data_parallel.py

The first step of the tutorial: every process holds the whole model. `train_hybrid.py` splits it.
"""

from colossal_vit.data.loaders import load_data
from colossal_vit.engine import Trainer, Training, build_criterion, build_optimizer, build_scheduler, initialize
from colossal_vit.hooks import standard_hooks
from colossal_vit.main import Arguments, Run, Script, start
from colossal_vit.model.timm_vit import SETTINGS, build_timm_vit, check_timm_vit, describe_timm_vit

from vit_settings import IGNORED


def build(run: Run) -> Training:
    """Build what trains. `main` calls it, and so does whatever looks at a training, such as `--dry-run`."""
    config = run.config

    # ---- Data: the same global batches for any number of processes -------------------------------------------------
    train_dataloader, test_dataloader = load_data(run)

    # ---- Model -----------------------------------------------------------------------------------------------------
    model = build_timm_vit(config)
    run.log.info(describe_timm_vit(config, model))

    # ---- Criterion, optimizer, learning rate -----------------------------------------------------------------------
    criterion = build_criterion(config)
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
    trainer.fit(
        train_dataloader,
        epochs=run.config.NUM_EPOCHS,
        max_steps=args.max_steps,
        test_dataloader=test_dataloader,
        hooks=hooks,
    )
    run.log.info(f"metrics, curves and checkpoints are in {run.output}")


SCRIPT = Script(main, build, __doc__, {**IGNORED, **SETTINGS}, check_timm_vit, loader="cifar10.py")

if __name__ == "__main__":
    SCRIPT.run()
