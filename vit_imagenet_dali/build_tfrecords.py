"""Pack class folders of images into TFRecord shards with DALI index files; check them; index those made elsewhere.

    python build_tfrecords.py SOURCE OUTPUT        SOURCE has train/<class>/* and val/<class>/*, or test/, or a flat
                                                   val/; or <class>/* alone, of which a part is then for validation
    python build_tfrecords.py --verify OUTPUT      one line for each fault, with file and byte; exit code 1 if any
    python build_tfrecords.py --verify SOURCE      the same of image files in class folders, as scripts train on them
    python build_tfrecords.py --index-only OUTPUT  OUTPUT has TFRecords in train/ and validation/, or in one of them

OUTPUT gets `train/train-00000-of-01024`, `validation/validation-00000-of-00128`, `idx_files/<split>/<shard>.idx` (a
line `offset size` a record), `classes.txt` (line N is the class of label N; they are sorted), `build.json` (what was
asked for) and, if any image was bad, `skipped.txt` (path, tab, reason). A record is a tf.train.Example with
`image/encoded` and `image/class/label`, from 1. Training images are shuffled over all shards by --seed, so that none
is of one class; validation images stay in order. A SOURCE without train/ is split by the contents of the images, as
where a script trains on it. What is no grey or RGB JPEG is encoded as one. Killed at any moment, the same command
resumes, and the result is the same to the byte: a shard gets its name once it is on disk whole.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from itertools import zip_longest
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

from colossal_vit import typed_json
from colossal_vit.data.decoding import FORMATS
from colossal_vit.data.folders import INDEX_FILES, TEST, VALIDATION, has_class_folders
from colossal_vit.errors import Parser, TrainingError, UserError, in_one_line, oserror_as_user_error, run_command
from colossal_vit.files import sync
from typing_extensions import TypedDict

from image_files import prepare_image
from packing_source import scan, scan_unsplit
from tfrecord import (
    NUM_CLASSES,
    NUM_SHARDS,
    class_names,
    encode_record,
    find_shards,
    index_path,
    name_faults,
    parse_index,
    read_lines,
    record_faults,
    record_size,
)
from worker_pool import run_all, worker_pool

NAME = "build_tfrecords.py"
TEST_FRACTION = 0.2
MIN_IMAGES = 256  # a shard: a small set gets fewer shards
CHECK_SIZE = 8  # pixels of images that are decoded to be checked only


# ---- Files ----


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _publish(path: Path, text: str | None = None) -> None:
    """fsync a file and rename it from its temporary to its final name; with `text`, write it first."""
    with oserror_as_user_error(path):
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _temporary(path).write_bytes(os.fsencode(text))
        sync(_temporary(path))
        os.replace(_temporary(path), path)
        sync(path.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other builds. Workers inherit the lock, so it is released when they have ended, too."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build that writes to {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # some network file systems have no locks
        yield


# ---- Build ----


class ShardPlan(NamedTuple):
    """A planned shard: its path, that of its index, and (path relative to SOURCE, label, bytes) of its images."""

    path: Path
    index: Path
    images: list[tuple[str, int, int]]


def plan_shards(output: Path, split: str, images: list, num_shards: int | None, seed: int) -> list[ShardPlan]:
    """Distribute images evenly over shards; training images are shuffled by the seed first."""
    if num_shards is None:
        num_shards = max(1, min(NUM_SHARDS[split], len(images) // MIN_IMAGES))
    if num_shards > len(images):
        raise UserError(f"--{split}-shards {num_shards}: at most {len(images)}, the number of images, can be filled")
    if split == "train":
        images = random.Random(seed).sample(images, len(images))
    bounds = [len(images) * number // num_shards for number in range(num_shards + 1)]
    names = [f"{split}-{number:05d}-of-{num_shards:05d}" for number in range(num_shards)]
    return [
        ShardPlan(output / split / name, index_path(output, split, name), images[start:end])
        for name, start, end in zip(names, bounds, bounds[1:], strict=False)
    ]


def build_shard(args: argparse.Namespace, shard: ShardPlan) -> dict[str, str]:
    """Write a shard and its index under temporary names; runs in a worker.

    Returns:
        The images left out: path relative to SOURCE, in a line, behind the split if it does not tell that -> reason.
    """
    skipped, lines, offset = {}, [], 0
    split = shard.path.parent.name
    with oserror_as_user_error(shard.path), open(_temporary(shard.path), "wb") as file:
        for path, label, _ in shard.images:
            with oserror_as_user_error(args.source / path):
                data = (args.source / path).read_bytes()
            try:
                record = encode_record(prepare_image(data, args.resize, args.quality, args.check, FORMATS), label)
            except ValueError as error:
                named = path if path.split("/")[0] in ("train", "val", "validation") else f"{split}\t{path}"
                skipped[in_one_line(named.replace("\\", "\\\\"))] = " ".join(str(error).split())
                continue
            file.write(record)
            lines.append(f"{offset} {len(record)}\n")
            offset += len(record)
        _temporary(shard.index).write_text("".join(lines))
    return skipped


class BuildManifest(TypedDict):
    """What `build.json` must be to be compared."""

    __pydantic_config__ = typed_json.RECORD
    images: NotRequired[dict[str, typed_json.Count]]


def read_plan(output: Path) -> dict[str, Any]:
    """Return the contents of `build.json`; empty if there is none."""
    path = output / "build.json"
    try:
        return typed_json.read(path, BuildManifest) if path.exists() else {}
    except UserError as error:
        raise UserError(f"{error}; no build wrote this: take another folder") from None


def check_plan(output: Path, plan: dict[str, Any]) -> None:
    """Write `build.json`, or check that the existing one has the same plan.

    Raises:
        UserError: if it differs, naming the values.
    """
    if begun := read_plan(output):
        if other := [f"{key} {begun.get(key)} instead of {plan[key]}" for key in plan if begun.get(key) != plan[key]]:
            raise UserError(f"{output}: was begun with {other[0]}; resume with the same, or use an empty folder")
        return
    if there := [name for name in (*NUM_SHARDS, INDEX_FILES) if (output / name).exists()]:
        raise UserError(f"{output}: has {there[0]}/ but no build.json to resume; use an empty folder")
    _publish(output / "build.json", json.dumps(plan, indent=1) + "\n")


def read_skipped(output: Path) -> dict[str, str]:
    """Return the contents of `skipped.txt`: path -> reason."""
    path = output / "skipped.txt"
    pairs = [line.rsplit("\t", 1) for line in read_lines(path)] if path.exists() else []
    if any(len(pair) != 2 for pair in pairs):
        raise UserError(f"{path}: has a line without a tab; no build wrote this: take another folder")
    return dict(pairs)


def _unmade(shards: list[ShardPlan]) -> list[ShardPlan]:
    """Return the shards that are not whole on disk."""
    return [shard for shard in shards if not (shard.path.exists() and shard.index.exists())]


def _check_space(output: Path, shards: list[ShardPlan]) -> None:
    """Check, before anything is made, that the disk has the space for the images of these shards.

    Raises:
        UserError: if not.
    """
    needed = sum(size for shard in shards for *_, size in shard.images)
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
    if needed > free:
        raise UserError(f"{output}: the disk has {_size(free, floor)} left, and {_size(needed, ceil)} are needed")


def _size(count: int, rounded: Callable[[float], int]) -> str:
    """Return a number of bytes in MB, or from 1 GB on in GB, with one digit after the point."""
    return f"{rounded(count / 1e6)} MB" if count < 1e9 else f"{rounded(count / 1e8) / 10} GB"


def build(args: argparse.Namespace) -> int:
    """Pack `args.source` into `args.output`, resuming an interrupted build; returns the exit code."""
    output, start = args.output, time.monotonic()
    unsplit = not (args.source / "train").is_dir() and has_class_folders(args.source)
    for part in [""] if unsplit else ["train", *VALIDATION, TEST]:
        if output.resolve().is_relative_to((args.source / part).resolve()):
            raise UserError(f"{output}: would be among the class folders of {args.source}; take one outside of them")
    if unsplit:
        if args.synset_map:
            raise UserError(
                f"--synset-map {args.synset_map}: is for images without class folders, which {args.source} has"
            )
        wnids, images, digest = scan_unsplit(args.source, args.test_fraction or TEST_FRACTION)
    else:
        if args.test_fraction:
            raise UserError(f"--test-fraction {args.test_fraction}: {args.source} is no folder of class folders")
        wnids, images, digest = scan(args.source, args.synset_map)
    asked = {"train": args.train_shards, "validation": args.validation_shards}
    shards = {split: plan_shards(output, split, images[split], asked[split], args.seed) for split in images}
    plan = {key: getattr(args, key) for key in ("seed", "resize", "quality", "check")}
    plan["shards"] = {split: len(shards[split]) for split in images}
    plan["images"] = {split: len(images[split]) for split in images}
    plan["source"] = f"{digest[:16]} (digest of names, sizes and {'contents' if unsplit else 'times'})"
    every = [shard for split in images for shard in shards[split]]
    if not args.resize and not args.quality:
        _check_space(output, _unmade(every))
    with _locked(output), worker_pool(args.workers) as pool:
        check_plan(output, plan)
        _publish(output / "classes.txt", "".join(f"{wnid}\n" for wnid in wnids))
        for folder in (folder / split for folder in (output, output / INDEX_FILES) for split in images):
            folder.mkdir(parents=True, exist_ok=True)
        pending = _unmade(every)  # another build may have made some of them while this one waited
        sizes, total = [len(shard.images) for shard in pending], sum(plan["images"].values())
        print(f"{output}: {total} images of {len(wnids)} classes, {len(pending)} of {len(every)} shards to be made")
        skipped, tasks = read_skipped(output), [(args, shard) for shard in pending]
        with closing(run_all(pool, build_shard, tasks, sizes, "img", total - sum(sizes))) as results:
            for (_, shard), bad in results:
                skipped.update(bad)
                if bad:  # before the shard gets its name, and is not built again
                    _publish(output / "skipped.txt", "".join(f"{path}\t{skipped[path]}\n" for path in sorted(skipped)))
                if len(skipped) > total * args.max_bad / 100:
                    raise UserError(
                        f"{output / 'skipped.txt'}: {len(skipped)} bad images so far, more than --max-bad "
                        f"{args.max_bad:g} % of {total}; repair them, or allow more and resume"
                    )
                if len(bad) == len(shard.images):
                    raise UserError(f"{shard.path}: would be empty, all of its images are bad; make fewer shards")
                _publish(shard.index)
                _publish(shard.path)
    print(f"{output}: complete after {time.monotonic() - start:.0f} s, {len(skipped)} bad images left out")
    return 0


# ---- Index and verify ----


def index_shard(path: Path, index: Path) -> None:
    """Write the index of a shard; runs in a worker."""
    lines, offset, end = [], 0, path.stat().st_size
    with oserror_as_user_error(path), open(path, "rb") as file:
        while offset < max(end, 1):
            try:
                size = record_size(file, offset, end)
            except ValueError as error:
                raise UserError(f"{path} at byte {offset}: {error}; a whole TFRecord file is needed") from None
            lines.append(f"{offset} {size}\n")
            offset += size
    _publish(index, "".join(lines))


def index_only(args: argparse.Namespace) -> int:
    """Write the indices of all shards in `args.index_only`; returns the exit code."""
    output = args.index_only
    tasks = [
        (path, index_path(output, split, path.name)) for split in NUM_SHARDS for path in find_shards(output, split)
    ]
    if not tasks:
        raise UserError(f"{output}: has no TFRecords in train/ or validation/")
    with worker_pool(args.workers) as pool:
        for _ in run_all(pool, index_shard, tasks, [path.stat().st_size for path, _ in tasks], "B"):
            pass
    print(f"{output / INDEX_FILES}: {len(tasks)} index files")
    return 0


def verify_shard(path: Path, index: Path, num_classes: int, check: str) -> tuple[int, bytes, list[str]]:
    """Check every record of a shard, and its index; runs in a worker.

    Returns:
        The number of records; the concatenated CRCs of their data; a line for each fault.
    """
    faults, records, crcs, indexed = [], [], [], None
    try:
        indexed = parse_index(index)
    except UserError as error:
        faults.append(str(error))
    offset, end, sizes = 0, path.stat().st_size, dict(indexed or ())
    with oserror_as_user_error(path), open(path, "rb") as file:
        while offset < max(end, 1):
            try:
                size = record_size(file, offset, end)
                data, crc = file.read(size - 16), file.read(4)
                crcs.append(crc)
                for fault in record_faults(data, crc, num_classes, check):
                    faults.append(f"{path} at byte {offset}: {fault}")
            except ValueError as error:
                size = sizes.get(offset, 0)  # a damaged record's length may still be in the index
                go_on = 16 <= size < end - offset
                faults.append(f"{path} at byte {offset}: {error}{'' if go_on else '; the rest is not checked'}")
                if not go_on:
                    break
            records.append((offset, size))
            offset += size
        else:
            for number, (stated, found) in enumerate(zip_longest(indexed or (), records), start=1):
                if indexed is not None and stated != found:
                    where = f"{path} at byte {(found or stated)[0]}: line {number} of its index {index.name}"
                    faults.append(f"{where} says {stated}, but the record is {found} (offset, size)")
                    break
    return len(records), b"".join(crcs), faults


def verify(args: argparse.Namespace) -> int:
    """Check everything in `args.verify`, and print a line for each fault; returns the exit code."""
    output = args.verify
    if not output.is_dir():
        raise UserError(f"{output}: no such folder; OUTPUT is the folder with train/ and validation/")
    if has_class_folders(output):
        return verify_images(output)
    num_classes = len(class_names(output)) or NUM_CLASSES
    shards = [(split, path) for split in NUM_SHARDS for path in find_shards(output, split)]
    tasks = [(path, index_path(output, split, path.name), num_classes, args.check) for split, path in shards]
    with worker_pool(args.workers) as pool:
        results = dict(run_all(pool, verify_shard, tasks, [path.stat().st_size for _, path in shards], "B"))
    faults, records, by_content = [], dict.fromkeys(NUM_SHARDS, 0), {}
    for split in NUM_SHARDS:
        faults += name_faults(output, split, [path for of, path in shards if of == split])
    for (split, path), task in zip(shards, tasks, strict=True):
        num_records, content, of_shard = results[task]
        records[split] += num_records
        faults += of_shard
        if content and by_content.setdefault(content, path) != path:
            faults.append(f"{path}: has the same records as {by_content[content]}")
    skipped = read_skipped(output)
    for split, num_images in read_plan(output).get("images", {}).items():
        expected = num_images - sum(path.startswith(split[:3]) for path in skipped)  # train/, val/ or validation/
        if records[split] != expected:
            faults.append(f"{output / split}: has {records[split]} records, but {expected} images were to be packed")
    for fault in faults:
        print(in_one_line(fault))
    print(f"{output}: {len(faults)} faults in {len(shards)} shards with {sum(records.values())} records")
    return 1 if faults else 0


def verify_images(source: Path) -> int:
    """Check the images in class folders, each once, see `check_images`; returns the exit code."""
    from colossal_vit.data import class_images  # here, since torch takes long to load
    from colossal_vit.parallel.collectives import RankLogger

    parts, _ = class_images.find_parts(source)
    images = class_images.find_images(source, source / ".decoded", parts)
    log = RankLogger()
    digests = class_images.digest_contents(images, log)
    for line in (*images.left_out, *class_images.say_copies(images, digests, *class_images.split_by_folder(images))):
        print(line)
    damaged, odd = class_images.check_images(images, digests, CHECK_SIZE, CHECK_SIZE, log)
    lines = damaged | {number: f"{source / images.paths[number]}: {what}" for number, what in odd.items()}
    for _, line in sorted(lines.items()):
        print(in_one_line(line))
    faults = sum(not line.endswith(class_images.ONE_COLOUR) for line in lines.values())
    print(f"{source}: {faults} faults in {len(images.paths)} images")
    return 1 if faults else 0


# ---- Command line ----


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("source", type=Path, nargs="?", metavar="SOURCE")
    add("output", type=Path, nargs="?", metavar="OUTPUT")
    add("--verify", type=Path, metavar="FOLDER", help="check OUTPUT, or the images in SOURCE, instead")
    add("--index-only", type=Path, metavar="OUTPUT", help="write the index files of OUTPUT instead")
    add("--synset-map", type=Path, metavar="FILE", help="of a flat val/: lines 'wnid' in order, or 'name wnid'")
    for split, num_shards in NUM_SHARDS.items():
        usual = f"default {num_shards}, or fewer for under {MIN_IMAGES} images a shard"
        add(f"--{split}-shards", type=int, metavar="N", help=usual)
    add("--seed", type=int, default=0, help="of the order of the training images; default 0")
    add("--test-fraction", type=float, metavar="F", help=f"of an unsplit SOURCE; default {TEST_FRACTION}")
    add("--resize", type=int, metavar="N", help="shorten the shorter side of larger images to N pixels")
    add("--quality", type=int, metavar="Q", help="encode every image again, as a JPEG of this quality, up to 100")
    add("--check", choices=("header", "decode"), default="header", help="decode: of every image all pixels")
    add("--max-bad", type=float, default=0.1, metavar="PERCENT", help="how many images may be bad; default 0.1")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes; default one a CPU")
    args = parser.parse_args(argv)
    if [args.source, args.verify, args.index_only].count(None) != 2 or (args.source is None) != (args.output is None):
        parser.error("give SOURCE OUTPUT, or --verify FOLDER, or --index-only OUTPUT")
    limits = dict.fromkeys(("train_shards", "validation_shards", "resize", "workers"), (1, 99999))
    for name, (low, high) in {
        **limits,
        "quality": (1, 100),
        "max_bad": (0, 100),
        "test_fraction": (0.001, 0.999),
    }.items():
        if (value := getattr(args, name)) is not None and not low <= value <= high:
            parser.error(f"--{name.replace('_', '-')} {value}: must be from {low} to {high}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 2 for a `UserError`, 1 for faults found or a worker that died."""
    resumes = "the same command resumes from here"

    def act() -> int:
        args = parse(argv)
        for command, folder in ((build, args.output), (verify, args.verify), (index_only, args.index_only)):
            if folder is not None:
                try:
                    with oserror_as_user_error(folder):
                        return command(args)
                except BrokenProcessPool:
                    raise TrainingError(f"a worker was killed, perhaps for lack of memory; {resumes}") from None

    return run_command(NAME, act, f"interrupted; {resumes}")


if __name__ == "__main__":
    sys.exit(main())
