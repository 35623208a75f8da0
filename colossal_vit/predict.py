"""Answers of a trained model about images.

python -m colossal_vit.predict RUN IMAGE ... [--top 5] [--output answers.csv] [--attention FOLDER] [--ema]

RUN is a run directory, whose newest checkpoint is taken, a checkpoint of any layout, or a folder that `python -m
colossal_vit.checkpoint export` wrote. Images are prepared as the run's test images were. One process on one GPU, or on
the CPU.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.timm_model import class_names, image_reader, load_model
from colossal_vit.data.decoding import endings
from colossal_vit.data.folders import find_images
from colossal_vit.errors import Parser, UserError, in_one_line, oserror_as_user_error, reason, run_command
from colossal_vit.model.rollout import attention_rollout, check_rollout, draw_rollout
from torch import Tensor, nn

BATCH_SIZE = 64


class Answer(NamedTuple):
    """What a model says of an image.

    Attributes:
        path: of the image.
        classes: names, the most probable first.
        probabilities: of these classes.
    """

    path: Path
    classes: list[str]
    probabilities: list[float]


def open_model(run: Path, ema: bool) -> nn.Module:
    """Return the model of a run directory, a checkpoint or an exported folder, for inference.

    Raises:
        UserError: if there is none.
    """
    if (run / storage.MODEL).exists() and not storage.is_checkpoint(run):
        if ema:
            raise UserError(f"{run}: is an exported folder, which has one set of weights: leave --ema out")
        try:
            return timm.create_model(f"local-dir:{run}", pretrained=True).eval()
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"{run}: timm cannot build its model: {reason(error)}") from None
    return load_model(storage.open_named(run), ema=ema).eval()


def predict(
    model: nn.Module, paths: Sequence[Path], top: int, device: torch.device, attention: Path | None = None
) -> Iterator[Answer | str]:
    """Yield the model's answer to each image, in order; a line that says why for one that cannot be decoded.

    Args:
        model: from `open_model`.
        paths: of the images.
        top: how many classes an answer has.
        device: where the model runs.
        attention: the folder that gets a picture of each image, see `draw_rollout`, called by its number and name.

    Raises:
        OSError: if a picture cannot be written.
    """
    config = timm.data.resolve_model_data_config(model)
    read, names = image_reader(model), class_names(model)
    model = model.to(device)

    def prepare(path: Path) -> Tensor | str:
        try:
            return read(path)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor() as pool, torch.inference_mode():
        for start in range(0, len(paths), BATCH_SIZE):
            batch = paths[start : start + BATCH_SIZE]
            prepared = list(pool.map(prepare, batch))
            images = [image for image in prepared if isinstance(image, Tensor)]
            answers = iter(())
            if images:
                pixels = torch.stack(images).to(device)
                looked = attention_rollout(model, pixels) if attention else (model(pixels), [None] * len(images))
                logits, shares = looked
                values, classes = logits.softmax(dim=1).topk(min(top, len(names)))
                answers = zip(values.tolist(), classes.tolist(), shares, strict=True)
            for number, (path, image) in enumerate(zip(batch, prepared, strict=True), start + 1):
                if isinstance(image, str):
                    yield image
                    continue
                probabilities, labels, share = next(answers)
                if attention:
                    picture = draw_rollout(image, share.cpu(), config["mean"], config["std"])
                    picture.save(attention / f"{number:0{len(str(len(paths)))}}-{path.stem}.png")
                yield Answer(path, [names[label] for label in labels], probabilities)


def _get_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m colossal_vit.predict", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, a checkpoint or an exported folder")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="files, and folders with files")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes of each image (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a table as CSV, too")
    parser.add_argument(
        "--attention", type=Path, metavar="FOLDER", help="draw which patches of each image the model looks at, too"
    )
    parser.add_argument("--ema", action="store_true", help="take the moving averages of the weights")
    return parser


def answer(args: argparse.Namespace) -> int:
    """Print an answer for each image, and write them to `args.output`.

    Returns:
        The exit code: 1 if an image could not be decoded.
    """
    if args.top < 1:
        raise UserError(f"--top {args.top}: must be at least 1")
    if args.output and args.output.suffix.lower() in endings():  # the table's name was left out
        raise UserError(f"--output {args.output}: is the name of an image, not of a table: give another one")
    paths, left_out = find_images(args.images)
    model = open_model(args.run, args.ema)
    if args.attention:
        check_rollout(model)
        with oserror_as_user_error(args.attention):
            args.attention.mkdir(parents=True, exist_ok=True)
            if any(args.attention.iterdir()):
                raise UserError(f"--attention {args.attention}: is not empty: give another folder")
        if model.global_pool == "avg":
            left_out.append("no class token: attention is that of all patches' tokens, on average, which the head sees")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = 0
    output = args.output or Path(os.devnull)
    options = dict(encoding="utf-8", errors="surrogateescape", newline="")  # names of files need not be UTF-8
    with oserror_as_user_error(output), open(output, "w", **options) as file:
        table = csv.writer(file)
        columns = range(1, min(args.top, model.num_classes) + 1)
        table.writerow(["image", *(f"{kind}_{k}" for k in columns for kind in ("class", "probability"))])
        for found in predict(model, paths, args.top, device, args.attention):
            if isinstance(found, str):
                print(in_one_line(found), file=sys.stderr)
                failed += 1
                continue
            pairs = list(zip(found.classes, found.probabilities, strict=True))
            print(in_one_line(f"{found.path}: {', '.join(f'{name} {value:.1%}' for name, value in pairs)}"))
            table.writerow([found.path, *(cell for name, value in pairs for cell in (name, f"{value:.6f}"))])
    for line in left_out:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Answer about images, by default those of this process's command line; a `UserError` becomes one line on stderr.

    Returns:
        The exit code: 0, 1 if an image could not be decoded, 2 for a user's mistake, 130 for Ctrl-C.
    """
    return run_command("predict", lambda: answer(_get_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
