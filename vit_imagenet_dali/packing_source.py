"""What there is to pack: the images of a folder, their labels, and which of them are for validation."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from colossal_vit.data.folders import (
    TEST,
    VALIDATION,
    advice_without_images,
    by_class,
    class_folders,
    composed,
    list_files,
    say_omitted,
    say_untested,
)
from colossal_vit.errors import UserError, in_one_line

from tfrecord import NUM_SHARDS, read_lines

SCAN_THREADS = 16  # for folders on a network


def list_images(source: Path, omitted: list[str], folder: str) -> list[tuple[str, int, int]]:
    """Path relative to SOURCE, bytes and modification time (ns) of all files in a folder but hidden ones, sorted.

    For `omitted` see `class_folders`.
    """
    return [(f"{folder}/{file.path}", file.size, file.modified) for file in list_files(source / folder, omitted)]


def read_synset_map(path: Path, images: list[str]) -> list[str]:
    """Return the wnids of the images of a flat folder.

    A line of the file is a wnid, in the order of the sorted images, or a file name, with or without its ending, then a
    space or comma, then a wnid.
    """
    lines = [composed(line).replace(",", " ").split()[:2] for line in read_lines(path) if line.strip()]
    if lines and all(len(line) == 1 for line in lines):
        if len(lines) != len(images):
            raise UserError(f"{path}: has {len(lines)} wnids for {len(images)} images; one for each is needed")
        return [wnid for (wnid,) in lines]
    wnids = {Path(line[0]).stem: line[-1] for line in lines}
    names = [composed(Path(image).stem) for image in images]
    if missing := [image for image, name in zip(images, names, strict=True) if name not in wnids]:
        raise UserError(f"{path}: has no line for {missing[0]}; 'name wnid' or a wnid for each in order is needed")
    return [wnids[name] for name in names]


def _check_classes(folder: Path, classes: list[str]) -> None:
    if broken := [name for name in classes if "\n" in name or "\r" in name]:
        raise UserError(f"{folder}: has a class folder {broken[0]!r}; rename it without the line break")
    if len(classes) == 1:
        raise UserError(f"{folder}: has one class folder only, {classes[0]}; one for each class is needed")


def scan_unsplit(source: Path, fraction: float) -> tuple[list[str], dict[str, list[tuple[str, int, int]]], str]:
    """Scan class folders without a split as `scan` does, see `split_by_content`; the digest is of contents."""
    from colossal_vit.data import class_images  # here, since torch takes long to load
    from colossal_vit.parallel.collectives import RankLogger

    images = class_images.find_images(source, source / ".decoded")
    _check_classes(source, images.classes)
    digests = class_images.digest_contents(images, RankLogger())
    split = class_images.split_by_content(images, digests, fraction)
    for line in (*images.left_out, *class_images.say_copies(images, digests, *split)):
        print(line)
    found = list(zip(images.paths, (images.labels + 1).tolist(), images.sizes, strict=True))
    parts = {name: [found[number] for number in chosen] for name, chosen in zip(NUM_SHARDS, split, strict=True)}
    return images.classes, parts, hashlib.sha256(repr((digests, parts)).encode()).hexdigest()


def scan(source: Path, synset_map: Path | None) -> tuple[list[str], dict[str, list[tuple[str, int, int]]], str]:
    """Find all images.

    Returns:
        The wnids in the order of their labels; (path relative to SOURCE, label, bytes) of the images of each split; a
        digest of all paths, labels, sizes and modification times.

    Raises:
        UserError: if a folder is missing or empty, or files are misplaced.
    """
    train = source / "train"
    found = [source / name for name in VALIDATION if (source / name).is_dir()]
    if not found and (source / TEST).is_dir():  # ImageNet's own, beside val/, has no classes
        found = [source / TEST]
    if not train.is_dir() or len(found) != 1:
        there = ["train/"] * train.is_dir() + [f"{folder.name}/" for folder in found]
        raise UserError(
            f"{source}: has {' and '.join(there) or 'no train/'}; train/ and one of val/, valid/, validation/ "
            f"and test/, or class folders, are needed"
        )
    (validation,) = found
    omitted: list[str] = []
    found = [class_folders(folder, omitted) for folder in (train, validation)]
    (of_train, of_validation), (beside, beside_validation) = zip(*found, strict=True)
    folders = {"train": by_class(of_train), "validation": by_class(of_validation)}
    if not (wnids := list(folders["train"])):
        raise UserError(f"{train}: has no class folders; train/<wnid>/* is needed")
    _check_classes(train, wnids)
    if not of_validation and not synset_map:
        raise UserError(f"{validation}: has no class folders; name the file with its wnids with --synset-map")
    if of_validation and synset_map:
        raise UserError(f"--synset-map {synset_map}: is for images without class folders, which {validation} has")
    if others := sorted(folders["validation"].keys() - folders["train"].keys()):
        folder = validation / folders["validation"][others[0]][0]
        raise UserError(f"{folder}: there is no such class in {train}; add it there, or remove it")
    for folder, files in ((train, beside), (validation, beside_validation if of_validation else [])):
        if files:
            first = in_one_line(files[0])
            print(f"{folder}: {len(files)} files beside the class folders are left out, the first is {first}")
    labels, digest = {wnid: label for label, wnid in enumerate(wnids, start=1)}, hashlib.sha256()
    images = {"train": [], "validation": []}
    for split, folder in zip(images, (train, validation), strict=True):
        flat = split == "validation" and synset_map
        places = [(wnid, name) for wnid in wnids for name in folders[split].get(wnid, ())]
        parts = [folder.name] if flat else [f"{folder.name}/{name}" for _, name in places]
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            listed = list(pool.map(partial(list_images, source, omitted), parts))
        for (wnid, _), files in zip(places or [("", "")], listed, strict=True):
            if not files:
                continue
            paths, sizes, _ = zip(*files, strict=True)
            of_files = read_synset_map(synset_map, paths) if flat else [wnid] * len(files)
            if unknown := set(of_files) - set(wnids):
                raise UserError(f"{synset_map}: {min(unknown)} is not a class folder of {train}")
            images[split] += zip(paths, [labels[wnid] for wnid in of_files], sizes, strict=True)
            digest.update(repr((files, of_files)).encode())
        there = {label for _, label, _ in images[split]}
        lacking = [wnid for wnid in wnids if labels[wnid] not in there]
        if lacking and (split == "train" or not there):
            empty = folder / folders[split][lacking[0]][0] if split == "train" else folder
            raise UserError(f"{empty}: has no images; {advice_without_images(empty)}")
        if lacking:
            print(say_untested(folder, lacking, len(wnids))[0])
    for line in say_omitted(omitted):
        print(line)
    return wnids, images, digest.hexdigest()
