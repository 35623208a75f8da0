"""What only the same rank of the same layout can resume: the states of its random number generators."""

import base64
from collections.abc import Mapping
from typing import Any

import torch
from colossal_vit import config
from colossal_vit.errors import UserError
from colossalai.accelerator import get_accelerator
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.context.random import get_current_mode, get_states, set_seed_states
from colossalai.legacy.core import global_context as gpc
from torch import Tensor


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def random_state() -> dict[str, str]:
    """States of this rank's random number generators in base64: PyTorch's on the CPU, and Colossal-AI's by mode."""
    states = get_states(copy=True)
    states[get_current_mode()] = get_accelerator().get_rng_state()
    return {"CPU": _encode(torch.get_rng_state()), **{mode.name: _encode(state) for mode, state in states.items()}}


def load_random_state(states: Mapping[str, str], source: str) -> None:
    """Restore the generators from what `random_state` returned.

    Raises:
        UserError: if they cannot be, naming `source`.
    """
    try:
        torch.set_rng_state(_decode(states["CPU"]))
        for mode in get_states():
            set_seed_states(mode, _decode(states[mode.name]))
        get_accelerator().set_rng_state(get_states()[get_current_mode()])
    except (KeyError, ValueError, RuntimeError) as error:  # no such generator, no base64, of another length
        raise UserError(f"{source}: is no state of this rank's random number generators: {error}") from None


def rank_layout() -> dict[str, Any]:
    """What has to be unchanged for saved random number states to apply: world size, parallel sizes, device type."""
    return {
        "world_size": gpc.get_world_size(ParallelMode.GLOBAL),
        "parallel": gpc.config.parallel,
        "num_chunks": config.num_model_chunks(gpc.config),
        "device": get_accelerator().get_current_device().type,
    }
