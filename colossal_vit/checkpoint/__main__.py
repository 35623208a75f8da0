"""Checkpoints from the command line.

python -m colossal_vit.checkpoint ls RUN_DIRECTORY
python -m colossal_vit.checkpoint verify RUN_DIRECTORY|CHECKPOINT ...
python -m colossal_vit.checkpoint export CHECKPOINT FOLDER [--dtype fp16] [--ema] [--onnx] [--images FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from colossal_vit.checkpoint.storage import Checkpoint, named_by, open_named
from colossal_vit.errors import Parser, UserError, run_command

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _ls(args: argparse.Namespace) -> int:
    best = None
    for path in named_by(args.run):
        try:
            state = Checkpoint(path).state
            size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
        except (UserError, OSError) as error:
            if path.exists():  # else the run, which is still training, has removed it
                print(f"{path.name}  damaged: {error}")
            continue
        best = best or state["best"]  # the newest checkpoint has the latest record of it
        mark = f"  best: {best['accuracy']:.2%}" if best and best["step"] == state["step"] else ""
        print(f"{path.name}  epoch {state['epoch']}  {size:.1f} MB{mark}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    code = 0
    for path in [each for named in args.paths for each in named_by(named)]:
        try:
            print(f"{path}: good, step {Checkpoint(path).state['step']}")
        except UserError as error:
            if path in args.paths or path.exists():  # else the run, which is still training, has removed it
                print(error)
                code = 1
    return code


def _export(args: argparse.Namespace) -> int:
    checkpoint = open_named(args.checkpoint)
    # It takes seconds to import, which the verbs above do without.
    from colossal_vit.checkpoint.export import export

    said = export(checkpoint, args.folder, _DTYPES[args.dtype], args.ema, args.onnx, args.images)
    print(f'{checkpoint.path} is in {args.folder}: timm.create_model("local-dir:{args.folder}", pretrained=True)')
    print("\n".join(said))
    return 0


def _get_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m colossal_vit.checkpoint",
        description=__doc__,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    verb = verbs.add_parser("ls", help="list the checkpoints of a run, newest first")
    verb.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    verb.set_defaults(act=_ls)

    verb = verbs.add_parser("verify", help="check every byte; the exit code is 1 if any is damaged")
    verb.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint, or a run directory for all")
    verb.set_defaults(act=_verify)

    verb = verbs.add_parser("export", help="write a folder for timm, transformers and onnxruntime, and prove it")
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="or a run directory for the newest")
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="must not exist, or be empty")
    verb.add_argument("--dtype", choices=_DTYPES, default="fp32", help="of the weights (default %(default)s)")
    verb.add_argument("--ema", action="store_true", help="take the moving averages of the weights")
    verb.add_argument("--onnx", action="store_true", help="write an ONNX model, too, which normalises pixels itself")
    verb.add_argument(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="compare logits on the images in this folder instead of on the run's test images",
    )
    verb.set_defaults(act=_export)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process; a `UserError` becomes one line on stderr.

    Returns:
        The exit code: 0, 1 if `verify` found damage, 2 for a user's mistake, 130 for Ctrl-C.
    """

    def act() -> int:
        args = _get_parser().parse_args(argv)
        return args.act(args)

    return run_command("checkpoint", act)


if __name__ == "__main__":
    sys.exit(main())
