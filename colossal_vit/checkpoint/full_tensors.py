"""The full tensors of a checkpoint, gathered from the shards of all ranks: into memory, or into files.

In memory they are a copy, which rank 0 writes while training continues. Where that would take too much memory, each
rank writes some of them to their places in the files, one at a time.
"""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.host_memory import Host
from colossal_vit.checkpoint.storage import EMA, MODEL, OPTIMIZER, TensorFiles
from colossal_vit.checkpoint.tensor_file import TensorFile
from colossal_vit.checkpoint.tensors import ParameterSlot, buffers, parameter_slots
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.fully_sharded import DataShard
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import all_gather_object, raise_on_all_ranks, run_on_rank_0
from colossalai.accelerator import get_accelerator
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor

# Two kinds of a parameter's tensors, by names that no moment has; the others are its moments, by their own.
WEIGHT, AVERAGE = "<weight>", "<average>"
_DATA, _TENSOR = ParallelMode.DATA, ParallelMode.TENSOR


class Saved(NamedTuple):
    """A full tensor of a checkpoint: its name in its file, its shape and its type; and the file."""

    key: str
    shape: list[int]
    dtype: torch.dtype
    file: str


@dataclass
class _Source:
    """Where the full tensors of a parameter, or of a buffer, come from.

    Attributes:
        shape: of each of them.
        dtypes: their types, by kind.
        sender: which rank sends them to rank 0, if that gets all; None before it has said so.
    """

    shape: list[int]
    dtypes: dict[str, torch.dtype]
    sender: int | None

    def add(self, other: "_Source") -> None:
        """Add what another rank knows of them."""
        self.dtypes |= other.dtypes
        self.sender = other.sender if self.sender is None else self.sender

    def saved(self, name: str) -> dict[str, Saved]:
        """Return what is saved of them, by kind."""
        places = {WEIGHT: (name, MODEL), AVERAGE: (name, EMA)}
        found = {}
        for kind, dtype in sorted(self.dtypes.items()):
            key, file = places.get(kind, (f"{kind}.{name}", OPTIMIZER))
            found[kind] = Saved(key, self.shape, dtype, file)
        return found


def _pieces(engine: Engine, slot: ParameterSlot) -> dict[str, Tensor]:
    """Return what this rank has of a parameter's tensors, by kind."""
    pieces = {WEIGHT: slot.master}
    if engine.ema:
        pieces[AVERAGE] = engine.ema.averages[slot.master]
    state = engine.optimizer.optim.state.get(slot.master, {})
    return pieces | {moment: value for moment, value in state.items() if isinstance(value, Tensor) and value.ndim}


class FullTensors:
    """The full weights, buffers, moments and averages of a model. Making one is collective, as its methods are.

    Args:
        engine: has this rank's pieces of them.

    Attributes:
        saved: all of them, by file, in one order on all ranks.
        nbytes: of all together.
    """

    def __init__(self, engine: Engine):
        self._rank = gpc.get_global_rank()
        # Of what each replica has, only one takes part. All have to where parameters are split over them.
        self._slots = [s for s in parameter_slots(engine) if isinstance(s.shard, DataShard) or s.in_first_replica]
        self._pieces = [_pieces(engine, slot) for slot in self._slots]
        self._buffers = buffers(engine) if self._rank == 0 else {}
        self._sources: dict[str, _Source] = {}
        for known in all_gather_object(self._own_sources()):
            for name, source in known.items():
                self._sources.setdefault(name, source).add(source)
        self.saved: dict[str, list[Saved]] = {MODEL: [], OPTIMIZER: []} | ({EMA: []} if engine.ema else {})
        for name, source in self._sources.items():
            for saved in source.saved(name).values():
                self.saved[saved.file].append(saved)
        listed = chain.from_iterable(self.saved.values())
        self.nbytes = sum(math.prod(saved.shape) * saved.dtype.itemsize for saved in listed)

    def _own_sources(self) -> dict[str, _Source]:
        """Return what this rank knows of all tensors."""
        first = gpc.get_local_rank(_TENSOR) == 0
        found = {}
        for slot, pieces in zip(self._slots, self._pieces, strict=True):
            shape, dtypes = slot.shard.full_shape(slot.master.shape), {kind: p.dtype for kind, p in pieces.items()}
            found[slot.shard.name] = _Source(shape, dtypes, self._rank if first and slot.in_first_replica else None)
        for name, buffer in self._buffers.items():
            found[name] = _Source(list(buffer.shape), {WEIGHT: buffer.dtype}, self._rank)
        return found

    def _writers(self) -> list[tuple[int, int]]:
        """Return which of the ranks that make them full ones write each parameter's tensors: replica, tensor rank.

        These ranks have the same slots in the same order, and each writes about as much.
        """
        split = any(isinstance(slot.shard, DataShard) for slot in self._slots)  # and then all are
        replicas = range(gpc.get_world_size(_DATA)) if split else [gpc.get_local_rank(_DATA)]
        loads = dict.fromkeys(product(replicas, range(gpc.tensor_parallel_size)), 0)
        writers = []
        for slot in self._slots:
            writers.append(min(loads, key=loads.__getitem__))
            loads[writers[-1]] += math.prod(self._sources[slot.shard.name].shape)
        return writers

    def _each(self, to_rank_0: bool) -> Iterator[tuple[Saved, Tensor, int, bool]]:
        """Yield full tensors: all on rank 0, or, on every rank, those that it writes.

        Returns:
            Of each what it is, the tensor, 0, and whether it shares memory with the model. A rank that writes has its
            piece instead of a tensor if that can be written as it is; and where it begins, in elements, instead of 0.
        """
        cpu, own = gpc.get_cpu_group(ParallelMode.GLOBAL), (gpc.get_local_rank(_DATA), gpc.get_local_rank(_TENSOR))
        for slot, pieces, writer in zip(self._slots, self._pieces, self._writers(), strict=True):
            source, split = self._sources[slot.shard.name], isinstance(slot.shard, DataShard)
            for kind, saved in source.saved(slot.shard.name).items():
                piece = pieces.get(kind)
                if piece is None:  # it gets no gradient here, see `Shard.owner`, and so has no moments
                    piece = torch.zeros_like(slot.master, dtype=saved.dtype)
                if not to_rank_0 and split and (start := slot.shard.start_of(piece)) is not None:
                    yield saved, piece, start, True
                    continue
                if split:
                    tensor = slot.shard.gather_at(0 if to_rank_0 else writer[0], piece)
                else:
                    tensor = slot.shard.gather(piece)
                keeps = self._rank == 0 if to_rank_0 else own == writer
                if keeps:
                    yield saved, tensor, 0, tensor.data_ptr() == piece.data_ptr()
                elif to_rank_0 and self._rank == source.sender:
                    dist.send(tensor.cpu().contiguous(), 0, group=cpu)
        for name, buffer in self._buffers.items():
            yield self._sources[name].saved(name)[WEIGHT], buffer, 0, True
        if to_rank_0 and self._rank == 0:
            for name, source in self._sources.items():
                if source.sender:
                    for saved in source.saved(name).values():
                        tensor = torch.empty(saved.shape, dtype=saved.dtype)
                        dist.recv(tensor, source.sender, group=cpu)
                        yield saved, tensor, 0, False

    @torch.no_grad()
    def copy(self) -> TensorFiles | None:
        """Return all tensors, by file and name, on the CPU of rank 0; None on the others."""
        host, files = Host(), {name: {} for name in self.saved}
        for saved, tensor, _, shares in self._each(to_rank_0=True):
            files[saved.file][saved.key] = host.copy(tensor, needed=shares)
        get_accelerator().synchronize()  # the copies from a GPU are complete
        return files if self._rank == 0 else None

    @torch.no_grad()
    def write(self, path: Path) -> Path:
        """Write all tensors into a temporary folder, for a checkpoint at `path`.

        Each rank writes some, if all see the folder; otherwise rank 0 writes all. No rank has more than one at a time
        beside its own pieces.

        Returns:
            The folder, for `storage.finish`.

        Raises:
            UserError: on every rank, saying why it cannot be written; the folder is removed.
        """

        def files_in(folder: Path) -> dict[str, TensorFile]:
            return {name: TensorFile(folder / name, listed) for name, listed in self.saved.items()}

        def begin() -> Path:
            with _described():
                return storage.begin(path, lambda folder: [file.create() for file in files_in(folder).values()])

        scratch = run_on_rank_0(begin)
        to_rank_0 = not all(all_gather_object(scratch.is_dir()))
        files = files_in(scratch)
        failure: OSError | None = None
        try:
            with raise_on_all_ranks(), _described():
                for saved, tensor, start, _ in self._each(to_rank_0):
                    try:
                        if failure is None:
                            files[saved.file].write(saved.key, tensor, start)
                    except OSError as error:  # the other ranks need this one's pieces of what follows
                        failure = error
                for file in files.values():
                    file.close()
                if failure:
                    raise failure
        except UserError:
            if self._rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        return scratch


@contextmanager
def _described() -> Iterator[None]:
    """Turn an error of the disk into a `UserError` that says no more than what it is."""
    try:
        yield
    except OSError as error:
        raise UserError(error.strerror or str(error)) from None
