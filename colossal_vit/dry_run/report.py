"""A report of the memory and communication of each rank in an optimizer step.

What the train script builds makes its first optimizer step, for one rank of each pipeline stage. It uses
PyTorch's fake tensors, which have a shape and a type but no data, and fake process groups, whose other members need not
exist, so that a laptop can plan any model for any world size.
"""

import multiprocessing
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from colossal_vit.config.load import num_model_chunks
from colossal_vit.dry_run import pictures
from colossal_vit.dry_run.meter import SENT_SHARE, StepPlan, measure
from colossal_vit.dry_run.pictures import Piece
from colossal_vit.engine import Training
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.results import format_table
from colossalai.context import Config
from matplotlib.figure import Figure

BuildRank = Callable[[int], Training]  # what a train script builds for one rank of a layout, on fake tensors


def in_forks(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call functions at the same time, each in a forked process; a `UserError` or `TrainingError` is raised here."""
    fork = multiprocessing.get_context("fork")
    children = {}

    def child(function: Callable[[], Any], send: Connection) -> None:
        # Repairs PyTorch's thread pool after the fork, before autograd's.
        torch.set_num_threads(torch.get_num_threads())
        try:
            with redirect_stdout(None):
                send.send(function())
        except (UserError, TrainingError) as error:
            send.send(error)

    for function in functions:
        receive, send = fork.Pipe(duplex=False)
        children[receive] = fork.Process(target=child, args=(function, send))
        children[receive].start()
        send.close()
    answers: dict[Connection, Any] = {}
    while len(answers) < len(children):
        for receive in connection.wait(children.keys() - answers.keys()):
            try:
                answers[receive] = receive.recv()
            except EOFError:  # the child has printed its traceback
                for process in children.values():
                    process.kill()
                sys.exit(1)
    for process in children.values():
        process.join()
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return [answers[receive] for receive in children]


def in_fork(function: Callable[[], Any]) -> Any:
    """Call a function in a forked child process; its `UserError` or `TrainingError` is raised here."""
    return in_forks([function])[0]


def plan_rank(build_rank: BuildRank, rank: int) -> StepPlan:
    """Return the plan of what is built for one rank."""

    def measured() -> StepPlan:
        training = build_rank(rank)
        return measure(training.engine, training.train_dataloader)

    return in_fork(measured)


def plan_stages(build_rank: BuildRank) -> list[StepPlan]:
    """Return the plans for the first rank of each pipeline stage."""
    first = plan_rank(build_rank, 0)
    return [first] + [plan_rank(build_rank, rank) for rank in first.stage_ranks[1:]]


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as text, with ranges: 0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _layers(names: Iterable[str]) -> str:
    """Return the layers that parameters belong to, as text: `patch_embed, blocks 0-5`."""
    blocks, others = set(), {}
    for name in names:
        block = re.match(r"blocks\.(\d+)\.", name)
        if block:
            blocks.add(int(block[1]))
            others.setdefault("blocks")
        else:
            others.setdefault(name.split(".")[0])
    return ", ".join(f"blocks {_ranges(blocks)}" if name == "blocks" else name for name in others)


def _cost_of_failures(every_minutes: float) -> str:
    """Return what is lost on average: half of what lies between two checkpoints."""
    often = {"one in ten days": 0.1, "one a day": 1.0, "ten a day": 10.0}
    shares = (f"{rate * every_minutes / 2 / (24 * 60):.1%} of the time with {words}" for words, rate in often.items())
    return (
        f"a failure loses {every_minutes / 2:g} minutes on average, half of checkpoint.every_minutes, and a restart:"
        f"\n{', '.join(shares)}"
    )


def format_report(plans: list[StepPlan], notes: Sequence[str] = ()) -> str:
    """Return the plans of all pipeline stages as text, and the lines that the script adds."""
    layout, config = plans[0].layout, Config(plans[0].config)
    world = layout.world_size
    replica = layout.pipeline * layout.tensor
    lines = [f"{world} process(es): {layout}"]
    for stage, stage_plan in enumerate(plans):
        ranks = (replica * d + layout.tensor * stage + t for d in range(layout.data) for t in range(layout.tensor))
        lines.append(
            f"stage {stage}, rank(s) {_ranges(ranks)}: {_layers(stage_plan.shards)}; "
            f"{stage_plan.parameters:,} parameters on each"
        )
    parts = ["weights", "gradients", "optimizer", "activations", "peak"]
    memory = [[f"stage {s}"] + [f"{p.memory[part] / 1e6:,.1f}" for part in parts] for s, p in enumerate(plans)]
    lines += ["", *format_table(["memory of a rank, MB", *parts], memory)]

    kinds = [kind for kind in SENT_SHARE if any(kind in p.calls for p in plans)]
    if kinds:
        traffic = [
            [f"stage {s}"] + [f"{p.sent.get(kind, 0) / 1e6:,.2f} ({p.calls.get(kind, 0)})" for kind in kinds]
            for s, p in enumerate(plans)
        ]
        lines += ["", *format_table(["MB sent per step (calls)", *kinds], traffic)]
    if layout.pipeline > 1:
        chunks, micro_batches = num_model_chunks(config), config.NUM_MICRO_BATCHES
        bubble = (layout.pipeline - 1) / (chunks * micro_batches)
        lines += [
            "",
            f"pipeline bubble: (stages - 1) / (chunks × micro-batches) = ({layout.pipeline} - 1) / "
            f"({chunks} × {micro_batches}) = {bubble:.1%} of the time spent computing",
        ]
    lines += ["", _cost_of_failures(config.checkpoint["every_minutes"])]
    return "\n".join([*lines, "", *notes] if notes else lines)


def tensor_pieces(plan: StepPlan) -> dict[str, list[Piece]]:
    """Return what the tensor-parallel ranks hold of a ViT block's MLP weights and of an activation: pieces by title."""
    named = {name.split(".", 2)[-1]: name for name in reversed(plan.shards) if name.startswith("blocks.")}
    if not named.keys() >= {"mlp.fc1.weight", "mlp.fc2.weight", "norm1.weight"}:  # a model of another kind
        return {}
    shards = {key: plan.shards[named[key]] for key in ("mlp.fc1.weight", "mlp.fc2.weight")}
    norm = plan.shards[named["norm1.weight"]]
    pieces = in_fork(lambda: pictures.find_pieces(plan.config["parallel"], plan.layout.side, shards, norm))
    titles = {key: f"{named[key]}\n{' × '.join(map(str, plan.shapes[named[key]]))} (output × input)" for key in shards}
    batch, hidden = plan.config["BATCH_SIZE"], plan.shapes[named["norm1.weight"]][0]
    titles[pictures.ACTIVATION] = f"activations between blocks\n{batch} × {hidden} (images × hidden)"
    return {titles[key]: found for key, found in pieces.items()}


def draw_layout(plans: list[StepPlan]) -> Figure:
    """Draw a picture of the layout, see `pictures.draw_layout`."""
    layout = plans[0].layout
    stages = [_layers(stage_plan.shards) for stage_plan in plans]
    if len(stages) > 1:
        stages = [f"stage {number}; {layers}" for number, layers in enumerate(stages)]
    matrices = tensor_pieces(plans[0]) if layout.tensor > 1 else {}
    return pictures.draw_layout(str(layout), stages, layout.data, layout.tensor, matrices)


def run(build_rank: BuildRank, output: Path, notes: Callable[[Config, Path, int], list[str]] | None) -> None:
    """Print the report of what is built, and draw the layout.

    Args:
        build_rank: builds what a rank trains, on fake tensors.
        output: the run directory.
        notes: makes further lines, see `launch.flags.Arguments`.
    """
    plans = plan_stages(build_rank)
    more = notes(Config(plans[0].config), output, plans[0].layout.data) if notes else []
    print(format_report(plans, more))
    print(f"\n{pictures.write(draw_layout(plans), output / 'layout.png')}")
