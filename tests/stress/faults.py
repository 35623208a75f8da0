"""Damage to a run between two commands: strange records, and checkpoints that are forged with the right SHA-256."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossal_vit.checkpoint import storage
from colossal_vit.results import METRICS

import test_checkpoint

FIELDS = ["epoch", "images", "moments_step", "scaler", "config", "best"]  # that can be none of `WRONG`
WRONG = ["x", -1, [1], float("nan")]
STRANGE = [b"null", b"\xff", b"\0" * 9, b"[]", b'{"step": "x"}', b'{"step": -1}', b'{"step": 1e400}', b"[" * 99_999]


def add_a_strange_record(run: Path, draw: random.Random) -> None:
    """Put one of `STRANGE` between two records."""
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(STRANGE) + b"\n")
    (run / METRICS).write_bytes(b"".join(lines))


def forge(checkpoint: Path, draw: random.Random, fields: Sequence[str] = FIELDS, **values: Any) -> None:
    """Change a checkpoint's state: one of `fields` to something wrong, and each key of `values` to its value."""
    state = json.loads((checkpoint / storage.STATE).read_text())
    state |= {draw.choice(fields): draw.choice(WRONG), **values}
    test_checkpoint.forge(checkpoint, storage.STATE, storage._to_text(state).encode())
