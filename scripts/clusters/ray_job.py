"""Start torchrun on machines of a Ray cluster, one for each.

    python scripts/clusters/ray_job.py [--machines N] [--gpus N] [--restarts N] SCRIPT [flags of SCRIPT]

GPUs are those of a machine, each with a process; with --gpus 0 it is two processes on CPUs. If a machine is lost, all
are started again, up to --restarts times, and the run resumes from its newest checkpoint. SCRIPT and the run directory
lie where all machines see them; the processes start in the folder in which you type this.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray


@ray.remote
class Host:
    """What Ray starts on a machine."""

    def address(self) -> tuple[str, int]:
        """Return the address of this machine, and a free port."""
        with socket.socket() as found:
            found.bind(("", 0))
            return ray.util.get_node_ip_address(), found.getsockname()[1]

    def run(self, command: list[str], folder: str) -> int:
        """Run a command to its end; returns its exit code."""
        return subprocess.call(command, cwd=folder)


def run(args: argparse.Namespace) -> int:
    """Run the script once; returns the largest exit code of its machines.

    Raises:
        ray.exceptions.RayError: if a machine is lost.
    """
    group = ray.util.placement_group([{"GPU": args.gpus} if args.gpus else {"CPU": 1}] * args.machines, "STRICT_SPREAD")
    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    options = dict(num_gpus=args.gpus, num_cpus=0 if args.gpus else 1, scheduling_strategy=place)
    machines = [Host.options(**options).remote() for _ in range(args.machines)]
    try:
        address, port = ray.get(machines[0].address.remote())
        torchrun = [sys.executable, "-m", "colossal_vit.launch.torchrun", f"--nproc_per_node={args.gpus or 2}"]
        torchrun += [f"--nnodes={args.machines}", f"--master_addr={address}", f"--master_port={port}"]
        commands = [[*torchrun, f"--node_rank={rank}", *args.command] for rank in range(args.machines)]
        running = [each.run.remote(own, os.getcwd()) for each, own in zip(machines, commands, strict=True)]
        return max(ray.get(running))
    finally:
        for each in machines:
            ray.kill(each)
        ray.util.remove_placement_group(group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=1, help="default %(default)s")
    parser.add_argument("--gpus", type=int, default=8, help="default %(default)s")
    parser.add_argument("--restarts", type=int, default=20, help="default %(default)s")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    ray.init()
    for left in reversed(range(args.restarts + 1)):
        try:
            return run(args)
        except ray.exceptions.RayError as error:
            print(f"a machine is lost ({type(error).__name__}); {left} restarts left", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
