"""The records of a data set of TFRecords: where each lies, and which are left out as damaged."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from colossal_vit.data.folders import refuse_run
from colossal_vit.data.shards import find_shards, index_path, name_faults, parse_index, record_faults, wrong_index
from colossal_vit.data.tfrecord import record_size
from colossal_vit.data.worker_pool import run_all, worker_pool
from colossal_vit.errors import UserError, blame
from colossal_vit.files import write_text
from colossal_vit.parallel.ranks import RankLogger

EMPTY_RECORD = 16  # bytes


class Records(NamedTuple):
    """The non-empty shards of a split, the index file of each, and the offset and size of its records, (n, 2)."""

    shards: list[Path]
    indices: list[Path]
    places: list[np.ndarray]

    @property
    def counts(self) -> list[int]:
        return list(map(len, self.places))

    @property
    def num_images(self) -> int:
        return sum(self.counts)

    def digest(self) -> str:
        """A digest of the position of each record in its shard. It needs no image data, and nearly any change shows."""
        digest = hashlib.sha256()
        for shard, index in zip(self.shards, self.indices, strict=True):
            digest.update(f"{shard.name}\n{index.read_text()}".encode())
        return digest.hexdigest()


def find_records(data: Path, split: str) -> Records:
    """The records in `data/train` or `data/validation`.

    Raises:
        UserError: if there are none, shards are missing or from two sets, an index is missing or does not match, or
            `data` is a run directory.
    """
    shards = find_shards(data, split)
    if not shards:
        refuse_run(data)  # which has index files where bad records were left out
        if (data / split).is_dir():
            with blame(data / split):
                os.listdir(data / split)
        raise UserError(f"DATA = {data}: has no TFRecords in {split}/; build_tfrecords.py makes them from the images")
    for fault in name_faults(data, split, shards):
        raise UserError(fault)
    indices = [index_path(data, split, shard.name) for shard in shards]
    return list_records(shards, indices, whole=True)


def list_records(shards: list[Path], indices: list[Path], whole: bool) -> Records:
    """Count the records; with `whole`, check that each index covers its shard from the first byte to the last."""
    found = []
    for shard, index in zip(shards, indices, strict=True):
        lines, size, end = parse_index(index), shard.stat().st_size, 0
        for number, (offset, length) in enumerate(lines if whole else [], start=1):
            if offset != end or length <= EMPTY_RECORD:
                fault = f"{index}: line {number} is '{offset} {length}', but a record begins at byte {end}"
                raise wrong_index(index, fault)
            end += length
        if whole and end != size:
            raise wrong_index(index, f"{index}: ends at byte {end}, but {shard} has {size}")
        if lines:
            found.append((shard, index, np.array(lines)))
    return Records(*map(list, zip(*found, strict=True))) if found else Records([], [], [])


def find_bad(shard: Path, index: Path, num_classes: int, check: str) -> list[tuple[int, str]]:
    """Offset of each unusable record, and the reason; for `check` see `prepare_image`."""
    bad, end = [], shard.stat().st_size
    with open(shard, "rb") as file:
        for offset, _ in parse_index(index):
            try:
                length = record_size(file, offset, end) - 16
                faults = record_faults(file.read(length), file.read(4), num_classes, check)
                bad += [(offset, fault) for fault in faults][:1]
            except ValueError as error:
                bad.append((offset, str(error)))
    return bad


def leave_out(splits: list[Records], output: Path, num_classes: int, max_bad: int, log: RankLogger) -> None:
    """Check every record, and write index files without the bad ones to `output/idx_files`.

    Raises:
        UserError: if more than `max_bad` records are bad, or `output` has the data's own index files or cannot be
            written.
    """
    indices = {shard: index for records in splits for shard, index, _ in zip(*records, strict=True)}
    if any(filtered_index(output, index) == index.resolve() for index in indices.values()):
        raise UserError(f"--output {output}: is the data's folder, whose index files a run would replace: give another")
    tasks = [(shard, index, num_classes, "decode") for shard, index in indices.items()]
    bad = []
    with worker_pool(len(os.sched_getaffinity(0))) as pool:
        sizes = [shard.stat().st_size for shard in indices]
        for (shard, index, *_), found in run_all(pool, find_bad, tasks, sizes, "B"):
            offsets = {offset for offset, _ in found}
            bad += [f"{shard} at byte {offset}: {reason}" for offset, reason in found]
            filtered = filtered_index(output, index)
            kept = [f"{offset} {size}\n" for offset, size in parse_index(index) if offset not in offsets]
            with blame(filtered):
                filtered.parent.mkdir(parents=True, exist_ok=True)
                write_text(filtered, "".join(kept))  # atomically: a run that is being evaluated reads it again
    for line in sorted(bad)[: max_bad + 1]:
        log.info(f"left out: {line}")
    if len(bad) > max_bad:
        raise UserError(f"dali.max_bad = {max_bad}, but {len(bad)} records are bad; {min(bad)}")
    log.info(f"{len(bad)} bad records of {sum(records.num_images for records in splits)} are left out")


def filtered_index(output: Path, index: Path) -> Path:
    """The path, in the run directory, of the copy of an index file without bad records."""
    return index_path(output, index.parent.name, index.stem)
