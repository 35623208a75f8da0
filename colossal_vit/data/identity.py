"""What a run's data are: checked against its config, and recorded, so that no other data resume it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colossal_vit.data.folders import composed
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import all_gather_object
from colossal_vit.run import Run
from colossalai.context import Config

OWN = "class folders"  # what kind of files the user's own images are


CONTENTS = "content of training images", "content of test images"


def identify(
    images: str,
    counts: tuple[int, int],
    classes: Sequence[str] | int,
    digest: str,
    contents: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Return what a run's data are, wherever they lie; a checkpoint keeps it, and no other data resume that checkpoint.

    Args:
        images: what kind of files.
        counts: of images for training and for testing.
        classes: their names in the order of their labels, or how many there are.
        digest: of the content, or of what nearly always changes with it.
        contents: digests of the contents of those for training and for testing, unless `digest` is of them.
    """
    identity = {
        "images": images,
        "training images": counts[0],
        "test images": counts[1],
        "classes": classes if isinstance(classes, int) else list(classes),
        "content": digest,
    }
    return identity | dict(zip(CONTENTS, contents or (), strict=False))


def _composed(classes: Any) -> Any:
    """Return names of classes as `composed` writes them, which earlier versions did not."""
    return list(map(composed, classes)) if isinstance(classes, list) else classes


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe in a few words how two identities differ; empty if they are the same."""
    said = []
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if key in CONTENTS:
            # Earlier checkpoints have none. Where a file was added, removed or renamed, that says it all.
            if None not in (before, after) and before != after and old.get("content") == new.get("content"):
                said.append(key)
            continue
        if key == "classes":
            before, after = map(_composed, (before, after))
        if before == after or (isinstance(before, int) and isinstance(after, list) and before == len(after)):
            continue  # earlier checkpoints may have the number of classes only
        if key == "classes" and isinstance(before, list) and isinstance(after, list):
            gone, came = ([name for name in a if name not in b][:3] for a, b in ((before, after), (after, before)))
            words = [f"{len(before)} classes → {len(after)}"] if len(before) != len(after) else []
            words += [f"without {', '.join(gone)}"] if gone else []
            words += [f"with {', '.join(came)}"] if came else []
            said.append(" ".join(words) or "classes in another order")
        else:
            said.append("content" if key == "content" else f"{key} {before} → {after}")
    return ", ".join(sorted(said))


def resolve_num_classes(config: Config, count: int, where: Path) -> None:
    """Make NUM_CLASSES the number of classes of the data, unless the config says it.

    Raises:
        UserError: if the config has fewer.
    """
    if config.setdefault("NUM_CLASSES", count) < count:
        raise UserError(
            f"NUM_CLASSES = {config.NUM_CLASSES}, but {where} has {count} classes: leave NUM_CLASSES out, or raise it"
        )


def record_dataset(
    run: Run,
    name: str,
    counts: tuple[int, int],
    classes: Sequence[str] | int,
    digest: str,
    folder: Path,
    contents: tuple[str, str] | None = None,
) -> None:
    """Log how many images a run has, and keep their identity in `run.data`. Collective.

    Args:
        run: of which data.
        name, counts, classes, digest, contents: see `identify`.
        folder: where they are.

    Raises:
        UserError: on every rank, if not all read the same data, in whichever folder.
    """
    run.data = identify(name, counts, classes, digest, contents)
    run.log.info(f"{counts[0]} training and {counts[1]} test images from {folder}")
    of_rank_0, *others = all_gather_object(run.data)
    for rank, data in enumerate(others, start=1):
        if said := differences(of_rank_0, data):
            raise UserError(f"rank 0 and rank {rank} read different data ({said}): DATA must be the same on all nodes")
