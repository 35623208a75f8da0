"""A run directory per command: the same command has one, another command has another."""

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
from colossal_vit.checkpoint.run_directory import MAX_NAME, default
from colossal_vit.compat.stand_ins import STAND_INS

import fork_ranks
import recipes

FOLDER = fork_ranks.ROOT / "vit_cifar10_hybrid"
SCRIPT, CONFIG = FOLDER / "train_hybrid.py", FOLDER / "configs" / "config_tensor_2d.py"


def name(*overrides, script=SCRIPT, config=CONFIG):
    return default(Path(script), Path(config), overrides)


def test_a_directory_reads_like_its_command():
    runs = fork_ranks.ROOT / "runs" / "vit_cifar10_hybrid"
    assert name() == runs / "train_hybrid" / "config_tensor_2d"
    overrides = ("parallel.pipeline=1", "BATCH_SIZE=16", "OPTIMIZER='adamw'", "fp16.mode=AMP_TYPE.NAIVE")
    said = "config_tensor_2d,BATCH_SIZE=16,OPTIMIZER=adamw,fp16.mode=NAIVE,parallel.pipeline=1"
    assert name(*overrides).name == said


def test_the_same_command_has_the_same_directory(tmp_path, monkeypatch):
    """In another order, said twice, written otherwise, from elsewhere, through a link."""
    expected = name("BATCH_SIZE=16", "LEARNING_RATE=0.001")
    assert name("LEARNING_RATE=1e-3", "BATCH_SIZE = 16") == expected
    assert name("BATCH_SIZE=8", "LEARNING_RATE=1e-3", "BATCH_SIZE=16") == expected
    (tmp_path / "link").symlink_to(FOLDER)
    linked = tmp_path / "link"
    here = name(script=linked / "train_hybrid.py", config=linked / "configs" / "config_tensor_2d.py")
    assert here == name()
    monkeypatch.chdir(FOLDER / "configs")
    assert name(script="../train_hybrid.py", config="config_tensor_2d.py") == name()


def test_another_command_has_another_directory(tmp_path):
    """Another script, config, value, or file of the same name; whatever is left out of a name is in its hash."""
    copies = [tmp_path / side / CONFIG.name for side in "ab"]
    long = [f"{key}={number}" for key in ("DEPTH", "NUM_HEADS", "HIDDEN_SIZE") for number in (10**70, 10**70 + 1)]
    directories = [
        name(),
        name(script=FOLDER / "train_dp.py"),
        name(config=CONFIG.with_name("config_tensor_1d.py")),
        name("BATCH_SIZE=16"),
        name("BATCH_SIZE=160"),
        name("CROP_AREA=(0.5, 1.0)"),
        name("CROP_AREA=[0.5, 1.0]"),
        name("DATA='/data/a b'"),
        name("DATA='/data/a_b'"),
        *(name(config=copy) for copy in copies),
        *(name(*long[start::2]) for start in range(2)),
    ]
    assert len(set(directories)) == len(directories)
    for directory in directories:
        assert len(os.fsencode(directory.name)) <= MAX_NAME + 9
        assert directory.name.isascii()
        assert not set(directory.name) & set(" '\"()[]{}$&;|<>*?/\\")


def test_two_commands_do_not_continue_each_other(tmp_path):
    """Through the command line: one is repeated and resumes, the other one begins."""
    script = tmp_path / "example" / "train_hybrid.py"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    argv = recipes.flags(DEPTH=1, BATCH_SIZE=128)

    def run(*more):
        result = fork_ranks.run(script, [*argv, *more, "--max-steps", "1"])
        assert result.codes == [0], str(result)
        return result.stdout[0]

    assert "resuming from" not in run()
    assert "resuming from" not in run("--set", "DEPTH=2")
    assert "resuming from" in run()
    runs = sorted((tmp_path / "runs" / "example" / "train_hybrid").iterdir())
    assert len(runs) == 2
    assert all(run.name.startswith("config_pipeline_parallel,BATCH_SIZE=128,") for run in runs)


# ---- What is not imported ----


def test_nothing_that_is_stood_in_for_is_imported(fresh_modules):
    """What a train script imports, seen before any test has run."""
    heavy = {"transformers", "accelerate", "bitsandbytes", "torch._inductor.compile_fx", "colossalai.shardformer"}
    assert not heavy & fresh_modules.keys()
    assert fresh_modules.keys() >= STAND_INS.keys() - {"colossalai._analyzer._subclasses._meta_registration"}


@pytest.mark.parametrize(
    "statement",
    [
        "from torch.distributed.optim import ZeroRedundancyOptimizer",
        "from torch.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer",
        "import torch; from torch.distributed import optim; ZeroRedundancyOptimizer = optim.ZeroRedundancyOptimizer",
    ],
)
def test_a_deferred_module_is_there_when_it_is_wanted(statement, fresh_modules):
    deferred = fresh_modules["torch.distributed.optim"]
    assert "ZeroRedundancyOptimizer" not in vars(deferred)

    def function():
        sys.modules["torch.distributed.optim"] = deferred
        for name in [name for name in sys.modules if name.startswith("torch.distributed.optim.")]:
            del sys.modules[name]
        found = {}
        exec(statement, found)
        return found["ZeroRedundancyOptimizer"].__name__

    assert fork_ranks.call(function, launched=False) == ["ZeroRedundancyOptimizer"]


def test_colossalai_imports_from_a_stand_in_what_it_holds(fresh_modules):
    for module, (names, _) in STAND_INS.items():
        for unused in names:
            stand_in = getattr(fresh_modules[module], unused)
            for use in (lambda it=stand_in: it(), lambda it=stand_in: it.load, lambda it=stand_in: isinstance(1, it)):
                with pytest.raises(ImportError, match=rf"^{module}\.{unused}.* is a stand-in in this process \(\w"):
                    use()
        with pytest.raises(AttributeError, match=rf"^{module}\.anything_else is a stand-in in this process"):
            _ = fresh_modules[module].anything_else
        with pytest.raises(ImportError, match=r"cannot import name 'anything_else' from '.*stand_ins\.py"):
            exec(f"from {module} import anything_else")


def test_stand_ins_are_no_obstacle_to_pickle():
    """It looks through all modules for what does not say where it comes from, as torch.compile's functions do."""

    def function():
        pass

    function.__module__, function.__qualname__ = None, "not_there"
    with pytest.raises(pickle.PicklingError, match="not_there"):
        pickle._dumps(function)
