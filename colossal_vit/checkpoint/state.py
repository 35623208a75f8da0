"""What each rank holds of a run: pieces of parameters, buffers, random numbers."""

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from colossal_vit import config
from colossal_vit.engine.engine import Engine
from colossal_vit.parallel.sharding import Shard
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
    """The generators of this rank: PyTorch's on the CPU, and one for each parallel mode of Colossal-AI's."""
    states = get_states(copy=True)
    states[get_current_mode()] = get_accelerator().get_rng_state()
    return {"CPU": _encode(torch.get_rng_state()), **{mode.name: _encode(state) for mode, state in states.items()}}


def load_random_state(states: Mapping[str, str]) -> None:
    torch.set_rng_state(_decode(states["CPU"]))
    for mode in get_states():
        set_seed_states(mode, _decode(states[mode.name]))
    get_accelerator().set_rng_state(get_states()[get_current_mode()])


def rank_layout() -> dict[str, Any]:
    """What must be the same for a rank's random numbers to mean the same."""
    return {
        "world_size": gpc.get_world_size(ParallelMode.GLOBAL),
        "parallel": gpc.config.parallel,
        "num_chunks": config.num_model_chunks(gpc.config),
        "device": get_accelerator().get_current_device().type,
    }


class ParameterSlot(NamedTuple):
    """A parameter that this rank holds a piece of: the model's own, and what the optimizer updates, mostly the same."""

    shard: Shard
    working: Tensor
    master: Tensor


def parameter_slots(engine: Engine) -> list[ParameterSlot]:
    masters = engine.optimizer.working_to_master_map
    return [ParameterSlot(p.shard, p, masters.get(p, p)) for p in engine.bare_model.parameters()]


def model_buffers(engine: Engine) -> dict[str, Tensor]:
    """What the model keeps beside its parameters, such as the running means of batch norms.

    That is what `state_dict` has, which Colossal-AI's layers make by communication.
    """
    return {
        f"{path}.{key}".removeprefix("."): buffer
        for path, module in engine.bare_model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }
