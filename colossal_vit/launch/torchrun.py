"""torchrun, whose end is that of its ranks: their exit code, and their line as the last one.

    python -m colossal_vit.launch.torchrun [flags of torchrun] SCRIPT [flags of SCRIPT]

torchrun itself ends with its own traceback and exit code 1, whatever the ranks say. Exit codes: that of the ranks; 130
for Ctrl-C; 75, or the ranks' `--exit-code-stopped`, if another signal stopped them; 128 + N if signal N ended a rank.
With LOGLEVEL set, torchrun's own log is printed, too.
"""

import argparse
import logging
import os
import signal
import sys

from colossal_vit.errors import Interrupted, Preempted, TrainingError, UserError, reason
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError


def _exit_code_stopped(flags: list[str]) -> int:
    """Return the exit code that the flags of a script name for a run that was stopped."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--exit-code-stopped", type=int, default=Preempted.exit_code)
    return parser.parse_known_args(flags)[0].exit_code_stopped


def _exit_code_failed(failed: ChildFailedError) -> int:
    """Return the exit code of ranks that have failed; one that a signal ended has said nothing itself."""
    codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    if (highest := max(codes.values())) > 0:
        return highest
    rank = min(codes, key=lambda rank: failed.failures[rank].timestamp)
    print(f"torchrun: error: rank {rank} ended by {signal.Signals(-codes[rank]).name}", file=sys.stderr)
    return 128 - codes[rank]


def main(words: list[str]) -> int:
    """Run torchrun with a command line; returns the exit code."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    args = run.parse_args(words)
    try:
        run.run(args)
    except ChildFailedError as failed:
        return _exit_code_failed(failed)
    except SignalException as stopped:  # by a signal that the ranks have had, too
        interrupted = stopped.sigval == signal.SIGINT
        return Interrupted.exit_code if interrupted else _exit_code_stopped(args.training_script_args)
    except (RendezvousError, ValueError) as error:  # wrong flags
        print(f"torchrun: error: {reason(error)}", file=sys.stderr)
        return UserError.exit_code if isinstance(error, ValueError) else TrainingError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
