"""What the ranks of a run have recorded: tensors, see `record_tensors`, and the files of the run directory."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist
from colossal_vit.checkpoint import storage
from colossal_vit.hooks.metrics import writes_metrics
from colossal_vit.results import read_metrics

from tools.parity.record_tensors import Record

Key = tuple[int, str, str]  # step, kind, name
Recorded = dict[Key, list[tuple[int, Record]]]  # with the rank

OF_STEPS = ("loss", "grad_norm", "lr", "loss_scale", "skipped")  # of the keys in metrics.jsonl
ACCURACIES = ("eval_accuracy", "eval_top5", "ema_accuracy", "ema_top5")
OF_EVALUATIONS = ("eval_loss", "ema_loss", *ACCURACIES, "eval_images")


def by_key(ranks: Sequence[Iterable[Record]]) -> Recorded:
    """Return the records of all ranks, in the order of the first one that has a tensor."""
    found: Recorded = {}
    for rank, records in enumerate(ranks):
        for record in records:
            found.setdefault(record.key, []).append((rank, record))
    return found


def of_run_directory(output: Path) -> list[Record]:
    """Return the metrics and checkpoints of a run, on the ranks that have written them; evaluations come last."""
    steps, evaluations = read_metrics(output) if writes_metrics() else ([], [])
    records = [*_metrics(steps, OF_STEPS)]
    if dist.get_rank() == 0:
        records += _tensors(output / storage.FOLDER)
    return [*records, *_metrics(evaluations, OF_EVALUATIONS)]


def _metrics(found: Iterable[dict], names: Iterable[str]) -> Iterator[Record]:
    for metrics in found:
        for name in names:
            if name in metrics:
                yield Record((metrics["step"], name, ""), None, 0, np.array(metrics[name], float))


def _tensors(folder: Path) -> Iterator[Record]:
    """Yield the tensors of all checkpoints in a folder: moments, weights, averages."""
    for path in storage.list_steps(folder):
        checkpoint = storage.Checkpoint(path)
        for file in (storage.OPTIMIZER, storage.MODEL, storage.EMA):
            for key, tensor in checkpoint.tensors(file).items() if file in checkpoint.files else ():
                kind, name = ("weight" if file == storage.MODEL else "average of"), key
                if file == storage.OPTIMIZER:
                    moment, _, name = key.partition(".")
                    kind = f"{moment} of"
                yield Record((checkpoint.state["step"], kind, name), None, 0, tensor.double().numpy())
