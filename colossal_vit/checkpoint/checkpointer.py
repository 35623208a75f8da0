"""`Checkpointer`: the run directory and the checkpoints of a run, behind one object."""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from colossal_vit import config, typed_json
from colossal_vit.checkpoint import run_directory, storage, tensors, weights
from colossal_vit.checkpoint.contents import State
from colossal_vit.checkpoint.full_tensors import FullTensors
from colossal_vit.checkpoint.lock import DirectoryLock
from colossal_vit.checkpoint.storage import Checkpoint
from colossal_vit.config.check import nearest
from colossal_vit.config.settings import Settings
from colossal_vit.data.batches import Normalization
from colossal_vit.data.identity import differences
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.files import free_name, write_text
from colossal_vit.launch.exits import Ending
from colossal_vit.parallel.collectives import all_gather_object, run_on_rank_0
from colossal_vit.results import read_metrics
from colossal_vit.run import Run
from colossalai.legacy.core import global_context as gpc
from torch import Tensor

OTHER_CLASSES = "set finetune.head to 'new', or add --accept-changes if other names mean the same"
OTHER_SHAPE = "change the config back, or start from its weights with finetune.weights"
WRITER_GRACE = 60.0  # seconds that a checkpoint may still take to be written when the run ends with an error
_PACKAGES = ("torch", "colossalai", "timm")  # whose versions are on record


def changed_values(old: Mapping[str, Any], new: Mapping[str, Any], schema: Settings) -> dict[str, list[Any]]:
    """Return the values that differ between a recorded config and a run's: key -> [before, after]."""
    before, after = config.plain(config.recorded(old, new, schema)), config.plain(new)
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return {key: [before.get(key), after.get(key)] for key in keys}


def _format_changes(changes: Mapping[str, list[Any]]) -> str:
    return ", ".join(f"{key} {before} → {after}" for key, (before, after) in changes.items())


def may_copy(num_bytes: int) -> bool:
    """Return whether this machine has the memory for a copy of the whole state: 4 GiB, or a quarter of what it has."""
    return num_bytes <= max(2**32, psutil.virtual_memory().available // 4)


def _raise(error: Exception) -> None:
    raise error


@contextmanager
def _writes_to(output: Path) -> Iterator[None]:
    """Turn errors of writing to the run directory into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror or error}") from None


class Checkpointer:
    """Prepares the run directory, loads the checkpoint that a run resumes, and saves others.

    `main.start` calls `prepare`, the train script `load`, `CheckpointHook` the others. All methods are collective;
    rank 0 alone reads and writes.

    Args:
        run: from `main.start`.

    Attributes:
        path: the checkpoint that the run resumes, or None.
        best: accuracy and step of the best checkpoint that is written after an evaluation, or None; on rank 0.
        num_bytes: of the tensors in the last checkpoint that was saved.
        trainer, train_dataloader: those of the run, from `load` on.
    """

    def __init__(self, run: Run):
        self.run, self.folder, self._asked = run, run.output / storage.FOLDER, run.output
        self.path: Path | None = None
        self.best: dict[str, Any] | None = None
        self.num_bytes = 0
        self._found: Checkpoint | None = None  # at `path`, on rank 0, until it is loaded
        self._weights: weights.Found | None = None  # that `finetune.weights` names, on rank 0, until they are loaded
        self._started_from: str | None = None  # the `--resume PATH` that the run began with
        self._changes: list[dict[str, Any]] = []  # that `--accept-changes` has accepted
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[str | None] | None = None  # the last save: why it failed, or None
        self._lock = DirectoryLock()
        run.exits.add_cleanup(self._lock.remove_unused)
        run.exits.add(self._wait_for_writer)

    def _wait_for_writer(self, ending: Ending) -> None:
        if self._writing and not ending.interrupted:
            wait([self._writing], WRITER_GRACE)

    # ---- Prepare ----

    def prepare(self) -> None:
        """Lock the run directory and find the checkpoint to resume, which stays readable. Writes nothing but the lock.

        A run normalises its images like the checkpoint, or else the weights, that it begins with.

        Raises:
            UserError: if the checkpoint is missing or not valid, the directory cannot be written, or another run has
                it.
        """
        self.path, self._started_from, normalization, self.run.output = run_on_rank_0(self._prepare)
        self.folder = self.run.output / storage.FOLDER
        for key, values in zip(("MEAN", "STD"), normalization or (), strict=False):
            given = self.run.config.setdefault(key, values)
            if self.path is None and tuple(given) != tuple(values):
                self.run.log.info(f"{key} = {given}, but finetune.weights were trained with {values}")

    def _prepare(self) -> tuple[Path | None, str | None, Normalization | None, Path]:
        args = self.run.args
        self._found = found = self._find_there()
        if args.eval_only and found is None and not (self.run.config.finetune or {}).get("weights"):
            raise UserError(
                f"--eval-only: no checkpoint in {self.folder}; name one with --resume PATH, or its --output"
            )
        path = found and found.path
        inherited = found.state.get("started_from") if self._is_own(path) else None
        given = str(self._given.resolve()) if self._given else inherited
        return path, given, self._normalization(), self.run.output

    def _find_there(self) -> Checkpoint | None:
        """Enter the run directory, and find the checkpoint that the run begins with.

        What is in the directory of an earlier run stays as it is: a new run takes `<name>.1`, `<name>.2`, ...
        """
        last = run_directory.latest(self._asked)
        begins_anew = self.run.args.resume == "never" and not self._is_restarted
        found = None
        if self.run.args.eval_only or not (begins_anew and run_directory.is_taken(last)):
            self._enter(last)
            found = self._find()
            if self.run.args.eval_only or self._is_own(found and found.path) or not run_directory.is_taken(last):
                return found
            self._lock.release()
        self._enter(free_name(self._asked))
        self.run.log.info(f"{last} has an earlier run: this one is in {self.run.output}")
        return found

    def _enter(self, directory: Path) -> None:
        """Make a directory that of the run, and lock it unless the run only reads there."""
        self.run.output, self.folder = directory, directory / storage.FOLDER
        if not self.run.args.eval_only:
            with _writes_to(directory):
                if reason := self._lock.acquire(directory):
                    self.run.log.info(
                        f"{directory}: cannot be locked ({reason}): see to it that no other run writes there"
                    )
                tempfile.TemporaryFile(dir=directory).close()

    def _normalization(self) -> Normalization | None:
        """Return how the images were normalised that the checkpoint, or else the weights of `finetune`, were trained
        with.
        """
        if self._found:
            return self._found.state.get("normalization")
        if not (named := (self.run.config.finetune or {}).get("weights")):
            return None
        try:
            self._weights = weights.find(named, self.run.config.finetune.get("checkpoint_key"))
            return weights.find_state(self._weights).get("normalization")
        except UserError as error:
            raise UserError(f"finetune.weights: {error}") from None

    @property
    def _given(self) -> Path | None:
        """The path that `--resume` names."""
        return None if self.run.args.resume in ("auto", "never") else Path(self.run.args.resume)

    @property
    def _is_restarted(self) -> bool:
        """Whether torchrun or SLURM has started the run again, by the command that it was started with."""
        counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
        return not self.run.args.eval_only and any(count.isdigit() and int(count) for count in counts)

    def _is_own(self, path: Path | None) -> bool:
        """Return whether a checkpoint is one of those in the run directory."""
        return path is not None and path.resolve().parent == self.folder.resolve()

    def _newer_than(self, path: Path) -> list[Path]:
        """Return the checkpoints in the run directory that are newer than `path`, if that is one of them."""
        steps = storage.list_steps(self.folder)
        names = [step.name for step in steps]
        return steps[: names.index(path.name)] if self._is_own(path) and path.name in names else []

    def _find(self) -> Checkpoint | None:
        """Return the checkpoint that `--resume` selects, or None.

        Raises:
            UserError: if the checkpoint at `--resume PATH` is not valid, or the run directory has newer ones.
        """
        args = self.run.args
        if args.resume == "never" and not self._is_restarted:
            return None
        newest, skipped = storage.newest(self.folder)
        # An evaluation takes the given path; a run that began with it resumes from its own checkpoints.
        began_there = newest and self._given and newest.state.get("started_from") == str(self._given.resolve())
        if args.resume == "auto" or self._is_restarted or (began_there and not args.eval_only):
            for reason in skipped:
                self.run.log.info(f"skipped: {reason}")
            if newest or args.resume == "auto":
                return newest
        return self._open_given() if self._given else None

    def _open_given(self) -> Checkpoint:
        if not self._given.exists():
            meant = nearest(self.run.args.resume, ("auto", "never"))
            raise UserError(f"--resume {self.run.args.resume}: no such path, and neither auto nor never{meant}")
        try:
            found = storage.open_named(self._given)
        except UserError as error:
            raise UserError(f"--resume {self.run.args.resume}: {error}") from None
        if (newer := self._newer_than(found.path)) and not self.run.args.eval_only:
            raise UserError(
                f"--resume {self.run.args.resume}: {self.folder} has newer ones, up to {newer[0].name}: give another "
                f"--output, or move them away"
            )
        return found

    # ---- Load ----

    def load(self, trainer: Trainer, train_dataloader: TrainLoader) -> None:
        """Load the checkpoint, or else the weights of the block `finetune`, and begin in the run directory.

        In the layout that wrote the checkpoint, a run resumes bit for bit; in another one with the same samples and
        random numbers, and other rounding. Until here, only the lock and DALI's index files were written.

        Args:
            trainer: of the run, before `Trainer.fit`.
            train_dataloader: as `engine.initialize` returned it.

        Raises:
            UserError: if the checkpoint is of another model or optimizer, or its data or config values that affect
                learning differ from this run's.
        """
        run, self.trainer, self.train_dataloader = self.run, trainer, train_dataloader
        if self.path:
            self._resume()
        elif run.config.finetune:
            self._start_from_weights()
        self._found = None  # if it was removed meanwhile, its disk space is free now
        if not run.args.eval_only:
            accumulation = trainer.engine.accumulation
            made = (trainer.cur_epoch * len(train_dataloader) + train_dataloader.start) // accumulation
            complete = made >= run.config.NUM_EPOCHS * len(train_dataloader) // accumulation
            complete |= trainer.engine.num_steps >= (run.args.max_steps or math.inf)
            if complete and self._given and not self._is_own(self.path):
                limit = "--max-steps" if run.args.max_steps else "NUM_EPOCHS"
                raise UserError(
                    f"--resume {run.args.resume}: {self.path.name} has made all steps of this run: raise {limit}"
                )
            run_on_rank_0(lambda: self._begin(complete))
            trainer.evaluated = complete and run_on_rank_0(lambda: self._is_evaluated(trainer.engine.num_steps))

    def _is_evaluated(self, step: int) -> bool:
        """Return whether the run directory has an evaluation of this step on record."""
        try:
            return any(record["step"] == step for record in read_metrics(self.run.output)[1])
        except OSError:
            return False

    def _resume(self) -> None:
        run, path, engine = self.run, self.path, self.trainer.engine
        state = run_on_rank_0(lambda: self._found.state)
        own = type(engine.optimizer.optim).__name__
        if run.args.eval_only:
            self._check_answers(state)
            self._load_tensors(None)
            engine.num_steps = state["step"]
            run.log.info(f"the weights are those of {path}, step {state['step']}")
            return
        if state["optimizer"] != own:
            raise UserError(
                f"{path}: was trained with {state['optimizer']}, but this run's optimizer is {own}: change it back, or "
                f"start from its weights alone with finetune.weights"
            )
        self._check_continues(state)
        images = (run.config.BATCH_SIZE, 3, run.config.IMG_SIZE, run.config.IMG_SIZE)
        engine.rebuild_ddp_buckets(images, state["step"])
        self._load_tensors(state)
        engine.num_steps = state["step"]
        self.trainer.cur_epoch = state["epoch"]
        # An accuracy on other images is not comparable, and a best checkpoint elsewhere is none of this run's.
        if self._is_own(self.path) and not self._other_data(state):
            self.best = run_on_rank_0(lambda: self._best_there(state["step"]))
        engine.optimizer.load_scaler_state(state["scaler"])
        self._seek(state)

    def _best_there(self, last: int) -> dict[str, Any] | None:
        """Return the record of the best checkpoint up to step `last` that is there and valid: a later best is a better
        one.
        """
        for path in storage.list_steps(self.folder):
            with suppress(UserError):  # damaged: what `best` names may be, or somebody has removed it
                saved = typed_json.read(path / storage.STATE, State)
                best = saved["best"]
                if saved["step"] <= last and best and best["step"] == saved["step"] and not self._other_data(saved):
                    return storage.Checkpoint(path).state["best"]
        return None

    def _check_answers(self, state: State) -> None:
        """Check that an evaluated model has as many heads, and that the classes are those that it has learned.

        Raises:
            UserError: naming what differs, unless `--accept-changes` is given.
        """
        self._check_classes(state, str(self.path), "set DATA to images of its classes")
        if other := self._other_data(state):
            self.run.log.info(f"this run's data are others than those of the checkpoint ({other})")
        said = weights.other_heads(state["config"], self.run.config)
        if said and not self.run.args.accept_changes:
            raise UserError(f"{self.path}: {said}: set it back")

    def _check_classes(self, state: State, named: str, remedy: str) -> None:
        learned, there = ((data or {}).get("classes") for data in (state.get("data"), self.run.data))
        if self.run.args.accept_changes or not (isinstance(learned, list) and isinstance(there, list)):
            return
        if said := differences({"classes": learned}, {"classes": there}):
            raise UserError(f"{named}: was trained with other classes ({said}): {remedy}")

    def _other_data(self, state: State) -> str:
        """Describe in a few words how this run's data differ from a checkpoint's."""
        return differences(state.get("data") or self.run.data or {}, self.run.data or {})

    def _check_continues(self, state: State) -> None:
        """Check that the data, and the config values that affect learning, are those of the checkpoint.

        What `--accept-changes` allows is put on record.

        Raises:
            UserError: naming what differs.
        """
        run = self.run
        seen = dict(zip(("MEAN", "STD"), state.get("normalization") or (), strict=False))
        changes = changed_values({**seen, **state["config"]}, run.config, run.schema)
        learned = {key: change for key, change in changes.items() if config.affects_training(key, *change, run.schema)}
        global_batch = run.layout.global_batch(run.config)
        if state["global_batch"] != global_batch:
            learned["global batch"] = [state["global_batch"], global_batch]
        other_data = self._other_data(state)
        self._changes = state.get("changes", [])
        if learned or other_data:
            said = [f"other data ({other_data})"] if other_data else []
            said += [f"other values ({_format_changes(learned)})"] if learned else []
            if not run.args.accept_changes:
                raise UserError(
                    f"{self.path}: was trained with {' and '.join(said)}: change that back, give another --output, or "
                    f"resume it as it is with --accept-changes"
                )
            self._changes = [*self._changes, {"step": state["step"], "values": learned, "data": other_data}]
        said = [_format_changes(changes)] if changes else []
        said += [f"data ({other_data})"] if other_data else []
        if said:
            run.log.info(f"changed since then: {', '.join(said)}")

    def _load_tensors(self, trained: State | None) -> None:
        """Load weights, averages if there are any, and the moments of a state with some."""
        engine, path, found = self.trainer.engine, str(self.path), self._found  # which only rank 0 has, and reads
        tensors.scatter_weights(engine, lambda: found.tensors(storage.MODEL), path, OTHER_SHAPE)
        if engine.ema:
            engine.ema.restart()  # from the weights, if the checkpoint has no averages
            if run_on_rank_0(lambda: storage.EMA in found.files):
                tensors.scatter_averages(engine, lambda: found.tensors(storage.EMA))
            elif self.run.args.eval_only:
                engine.ema = None  # an average of nothing
        if trained:
            updates = trained["moments_step"], trained.get("fewer_updates", {})
            tensors.scatter_moments(engine, lambda: found.tensors(storage.OPTIMIZER), *updates, path)

    def _seek(self, state: State) -> None:
        """Go to the place in the data and in the schedule where the checkpoint was saved.

        The place in the epoch is stored in images, which does not depend on the layout.
        """
        run, trainer = self.run, self.trainer
        steps_per_epoch = len(self.train_dataloader) // trainer.engine.accumulation
        steps = min(state["images"] // run.layout.global_batch(run.config), steps_per_epoch)
        self.train_dataloader.seek(state["epoch"], steps * trainer.engine.accumulation)
        if scheduled := state["epoch"] * steps_per_epoch + steps:  # the scheduler computes its rates from its step
            there = {"last_epoch": scheduled - 1, "_step_count": scheduled + 1}
            trainer.lr_scheduler.load_state_dict({**trainer.lr_scheduler.state_dict(), **there})
            trainer.lr_scheduler.step()
        run.log.info(
            f"resuming from {self.path}: step {state['step']}, epoch {state['epoch']} of {run.config.NUM_EPOCHS}, "
            f"{state['images']:,} images of that epoch done"
        )
        if state.get("ranks"):
            run.log.info(
                "it was written by an earlier version: from here on dropout and DALI draw random numbers that do not "
                "depend on the layout, which are not those that would have come"
            )

    def _start_from_weights(self) -> None:
        """Load the weights that `finetune.weights` names into a model that has made no step."""
        run, engine, finetune = self.run, self.trainer.engine, self.run.config.finetune
        named, head = finetune.get("weights"), finetune.head
        if named is None:
            raise UserError(
                "finetune is given, but there are no weights to start from: set finetune.weights, --resume a "
                "checkpoint, or leave the block out"
            )
        if run.args.eval_only and head == "new":
            raise UserError(
                f"--eval-only evaluates the head of finetune.weights = {named!r}, but finetune.head = 'new' starts "
                f"with one of zeros: set it to 'keep'"
            )
        shapes = {name: shape for own in all_gather_object(tensors.own_shapes(engine)) for name, shape in own.items()}

        def read() -> dict[str, Tensor]:
            try:
                if head == "keep":
                    self._check_classes(weights.find_state(self._weights), named, OTHER_CLASSES)
                return weights.read_fitted(self._weights, head, shapes, run.config, run.log.info)
            except UserError as error:
                raise UserError(f"finetune.weights: {error}") from None

        tensors.scatter_weights(engine, read, f"finetune.weights: {named}", weights.OTHER_MODEL)
        self._weights = None
        if engine.ema:
            engine.ema.restart()
        if run.args.eval_only:
            engine.ema = None  # an average of nothing
        run.log.info(f"starting from the weights of {named}, with {'a new head' if head == 'new' else 'their head'}")

    def _begin(self, complete: bool) -> None:
        """Prepare the run directory for the steps to come: write config.json, rename damaged checkpoints after them.

        Args:
            complete: whether no step is left; config.json then stays that of the steps made.
        """
        output, log = self.run.output, self.run.log
        with _writes_to(output):
            if self._is_own(self.path):
                storage.clean(self.folder)
                for newer in self._newer_than(self.path):
                    log.info(f"{newer} is {storage.rename_damaged(newer).name} now")
            self._lock.keep()
            self.folder.mkdir(exist_ok=True)
            if not (mark := output / run_directory.MARK).exists():
                write_text(mark, "" if output == self._asked else self._asked.name)
            if not complete or not (output / run_directory.CONFIG).exists():
                write_text(output / run_directory.CONFIG, config.to_json(self.run.config) + "\n")

    # ---- Save ----

    def save(self, epoch: int, start: int, accuracy: float | None = None) -> Path:
        """Save a checkpoint that resumes at micro-batch `start` of `epoch`, between two optimizer steps.

        All ranks wait while rank 0 gathers the state, which is written to disk in the background while training
        continues; or, if rank 0 has no memory for it, while each rank writes some of it. The newest of older ones stay,
        and the best.

        Args:
            epoch, start: where to resume.
            accuracy: of the evaluation that has just been made; None if there was none.

        Returns:
            Where it is being written to; if that cannot be done, `finish` and `check` say so.

        Raises:
            TrainingError: with `--on-save-error stop`, if the last checkpoint could not be written; as
                `Engine.wait_for_step`.
        """
        self.trainer.engine.wait_for_step()
        path = self.folder / f"step-{self.trainer.engine.num_steps:08d}"
        self._stop_on(self.finish())  # and so `best` is that of all earlier checkpoints
        state = self.state(epoch, start)
        if accuracy is not None and (self.best is None or accuracy > self.best["accuracy"]):
            state["best"] = {"accuracy": accuracy, "step": state["step"]}
        full = FullTensors(self.trainer.engine)
        self.num_bytes = full.nbytes
        if run_on_rank_0(lambda: may_copy(full.nbytes)):
            write = partial(storage.write, path, full.copy(), state)
        else:
            try:
                write = partial(storage.finish, full.write(path), path, state)
            except UserError as error:
                write = partial(_raise, OSError(None, str(error)))
        if gpc.get_global_rank() == 0:
            self._writing = self._writer.submit(self._write, path, write, state)
        return path

    def state(self, epoch: int, start: int) -> dict[str, Any]:
        """Return the contents of state.json, see `contents.State`."""
        run, engine = self.run, self.trainer.engine
        updates = tensors.num_updates(engine)
        most = max(updates.values(), default=0)
        global_batch = run.layout.global_batch(run.config)
        return {
            "step": engine.num_steps,
            "epoch": epoch,
            "images": start // engine.accumulation * global_batch,  # those that the epoch has had
            "global_batch": global_batch,
            "optimizer": type(engine.optimizer.optim).__name__,
            "moments_step": most,
            "fewer_updates": {name: number for name, number in updates.items() if number < most},
            "scaler": engine.optimizer.scaler_state(),
            "best": self.best,
            "config": config.plain(run.config),
            "normalization": self.train_dataloader.normalization,
            "versions": {name: metadata.version(name) for name in _PACKAGES},
            "data": run.data,
            "source": run.source,
            "started_from": self._started_from,
            "changes": self._changes,
        }

    def _write(self, path: Path, write: Callable[[], None], state: Mapping[str, Any]) -> str | None:
        """Write a checkpoint and remove old ones; returns why it could not be written, or None."""
        log = self.run.log
        try:
            write()
        except (OSError, MemoryError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "out of memory"
            failure = f"{path}: cannot be written: {reason}"
            if self.run.args.on_save_error != "stop":
                log.info(f"{failure}; training continues")
            return failure
        self.best = state["best"]
        try:
            storage.prune(path.parent, self.run.config.checkpoint.keep, self.best and self.best["step"])
        except OSError as error:  # the next save tries again
            log.info(f"{error.filename or path.parent}: cannot be removed: {error.strerror or error}")

    def check(self) -> None:
        """Raise what the last save has failed with, if it has ended; on rank 0, which ends the others.

        Raises:
            TrainingError: with `--on-save-error stop`, if the checkpoint cannot be written.
        """
        self._stop_on(self._writing.result() if self._writing and self._writing.done() else None)

    def _stop_on(self, failure: str | None) -> None:
        if failure and self.run.args.on_save_error == "stop":
            raise TrainingError(f"{failure}; earlier checkpoints are as they were (--on-save-error stop)")

    def finish(self) -> str | None:
        """Wait until the checkpoint in progress is written; returns why it could not be, or None."""
        return run_on_rank_0(lambda: self._writing and self._writing.result())
