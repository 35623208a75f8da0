"""ELASTIC: a run continues on the processes that there are, and keeps its global batch."""

from collections.abc import Callable

from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config


def choose_layout(
    config: Config, world_size: int, load: Callable[[list[str]], Config], check: Callable[[Config, Layout], None] | None
) -> tuple[Config, Layout]:
    """Return the layout and batch for as many of the processes as can work.

    Of `parallel` and ELASTIC_LAYOUTS, the first that has work for most processes, with as many data-parallel replicas
    as share GLOBAL_BATCH evenly, in batches as large as BATCH_SIZE allows.

    Args:
        config: with ELASTIC.
        world_size: processes that are there; the layout may have fewer.
        load: loads the config with further overrides, `KEY=VALUE`.
        check: of the script, raises a `UserError` for a config that does not fit the layout.

    Raises:
        UserError: if there are too few processes for a replica, none of the ways to share is possible, or one of
            ELASTIC_LAYOUTS is no value of `parallel`.
    """
    if "GLOBAL_BATCH" not in config:
        raise UserError("ELASTIC keeps the images of a step, on any number of processes: set GLOBAL_BATCH")
    if config.get("torch_ddp", {}).get("static_graph"):
        raise UserError(
            "torch_ddp.static_graph = True does not work with ELASTIC, which may need gradient_accumulation"
        )
    others = [[f"parallel={other}"] for other in config.get("ELASTIC_LAYOUTS", [])]
    try:
        choices = [([], config), *((other, load(other)) for other in others)]
    except UserError as error:
        raise UserError(f"ELASTIC_LAYOUTS: {error}") from None
    fitting: list[tuple[Config, Layout]] = []
    reason = None
    for overrides, choice in choices:
        try:
            fitting.append(_share(choice, world_size, lambda more, own=overrides: load([*own, *more]), check))
        except UserError as error:
            reason = reason or error
    if not fitting:
        raise reason
    return max(fitting, key=lambda found: found[1].world_size)


def _share(
    config: Config, world_size: int, load: Callable[[list[str]], Config], check: Callable[[Config, Layout], None] | None
) -> tuple[Config, Layout]:
    """Return the layout with the most replicas for one value of `parallel`; see `choose_layout`."""
    model = config.parallel.pipeline * config.parallel.tensor.size
    reason = None
    for replicas in range(max(world_size // model, 1), 0, -1):
        layout = Layout.of(config, min(replicas * model, world_size))
        share, rest = divmod(config.GLOBAL_BATCH, replicas)
        if rest:
            continue
        for size in range(min(config.BATCH_SIZE, share), 0, -1):
            if share % size or (size % 2 and config.get("mix")):  # images are mixed in pairs
                continue
            try:
                fitted = load([f"BATCH_SIZE={size}", f"gradient_accumulation={share // size}"])
                if check:
                    check(fitted, layout)
                return fitted, layout
            except UserError as error:
                reason = reason or error
    reason = reason or "mix needs an even BATCH_SIZE"
    raise UserError(f"GLOBAL_BATCH = {config.GLOBAL_BATCH} cannot be kept on {world_size} processes: {reason}")


def describe(config: Config, fitted: Config, world_size: int, layout: Layout) -> str:
    """Return what `choose_layout` has chosen, in one line."""
    idle = world_size - layout.world_size
    return (
        f"ELASTIC: {world_size} processes{f', {idle} of them without work' if idle else ''}; global batch "
        f"{config.GLOBAL_BATCH} with BATCH_SIZE {config.BATCH_SIZE} → {fitted.BATCH_SIZE}, gradient_accumulation "
        f"{config.gradient_accumulation} → {fitted.gradient_accumulation}"
    )
