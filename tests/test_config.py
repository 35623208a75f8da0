"""Config files: overrides reach what is derived from them, mistakes are named, published files load unchanged."""

import ast
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch
from annotated_types import Ge, Le, Lt
from colossal_vit import config as configs
from colossal_vit.checkpoint.checkpointer import changed_values
from colossal_vit.config import schema
from colossal_vit.config.complete import older_names
from colossal_vit.config.settings import OPTIONAL, Ignored, Setting, SettingsBlock
from colossal_vit.data.image_folder import draw_crops
from colossal_vit.data.samplers import GlobalBatchSampler
from colossal_vit.engine import build_criterion, build_optimizer, build_scheduler
from colossal_vit.engine.precision import wrap_model, wrap_optimizer
from colossal_vit.errors import UserError
from colossal_vit.model.timm_vit import check_timm_vit
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE
from pydantic import Field
from pydantic.fields import FieldInfo

import fork_ranks
import schemas
from cifar10 import Cifar10Loader
from mixup import with_mixup
from schemas import CALTECH101, DP, HYBRID, IMAGENET, SCRIPTS
from vit_settings import check_vit

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "vit_cifar10_hybrid" / "configs"
SHIPPED = sorted(ROOT.glob("vit_*/**/config*.py"))

# As the tutorial prints it, down to the import that 0.5.0 no longer has.
TUTORIAL = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 256
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 300
WARMUP_EPOCHS = 32
IMG_SIZE = 224
PATCH_SIZE = 16
HIDDEN_SIZE = 768
DEPTH = 12
NUM_HEADS = 12
MLP_RATIO = 4
NUM_CLASSES = 10
CHECKPOINT = True
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1
TENSOR_PARALLEL_SIZE = 2
TENSOR_PARALLEL_MODE = '1d'
parallel = dict(
    pipeline=2,
    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE)
)
fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0
NUM_MICRO_BATCHES = parallel['pipeline']
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
"""
TUTORIAL_DATA_PARALLEL = """
from colossalai.amp import AMP_TYPE
BATCH_SIZE = 256
DROP_RATE = 0.1
NUM_EPOCHS = 300
fp16 = dict(mode=AMP_TYPE.TORCH, )
NUM_CHUNKS = 1
gradient_accumulation = 16
clip_grad_norm = 1.0
dali = dict(gpu_aug=True, mixup_alpha=0.2)
"""


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides, script=None):
        path = tmp_path / "config.py"
        path.write_text(text)
        return configs.load(path, overrides, schemas.schema(script) if script else schemas.any_key())

    return load


def named_in(text):
    """The keys that a config file assigns."""
    assigned = [node.targets for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    names = {node.id for targets in assigned for target in targets for node in ast.walk(target) if hasattr(node, "id")}
    return {name for name in names if not name.startswith("_")}


def test_published_files_load_unchanged(load):
    config = load(TUTORIAL, script=HYBRID)
    assert config.parallel == {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}
    assert config.fp16.mode is AMP_TYPE.NAIVE
    assert config.TENSOR_SHAPE == (128, 197, 768)
    config = load(TUTORIAL_DATA_PARALLEL, script=DP)
    assert set(configs.idle_keys(config, schemas.schema(DP))) == {"dali", "model"}
    assert "NUM_CLASSES" not in config, "the data say it"
    assert config.fp16.mode is AMP_TYPE.TORCH
    assert config.parallel == {"pipeline": 1, "tensor": {"mode": None, "size": 1}}


def test_shipped_configs_have_the_published_values(load):
    """The hybrid file is the tutorial's, but for what makes it faster and changes nothing that is learned; the pipeline
    file is that without tensor parallelism."""
    published = load(TUTORIAL, script=HYBRID)
    hybrid = schemas.script(HYBRID).load(CONFIGS / "config_hybrid_parallel.py")
    faster = {"CHECKPOINT": False, "NUM_MICRO_BATCHES": 4, "TENSOR_SHAPE": (64, 197, 768)}
    del published["NUM_CLASSES"]  # the data say it
    assert hybrid == {**published, **faster}
    pipeline = schemas.script(HYBRID).load(CONFIGS / "config_pipeline_parallel.py")
    assert pipeline == {**hybrid, "parallel": {"pipeline": 2, "tensor": {"mode": None, "size": 1}}}
    data_parallel = schemas.script(DP).load(CONFIGS / "config_data_parallel.py")
    published = load(TUTORIAL_DATA_PARALLEL, script=DP)
    same = named_in(TUTORIAL_DATA_PARALLEL) - {"NUM_CHUNKS", "dali"}
    assert {key: data_parallel[key] for key in same} == {key: published[key] for key in same}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_names_what_it_learns_by(path):
    named = named_in(path.read_text())
    recipe = {"OPTIMIZER", "LEARNING_RATE", "WEIGHT_DECAY", "SCHEDULE", "WARMUP_EPOCHS", "NUM_EPOCHS", "BATCH_SIZE"}
    recipe |= {"LABEL_SMOOTHING", "FLIP", "fp16", "CROP_PADDING" if path.parent == CONFIGS else "CROP_AREA"}
    assert not recipe - named
    if configs.load(path, (), schemas.any_key()).OPTIMIZER == "sgd":
        assert "MOMENTUM" in named


FINE_TUNED = dict(weights="vit_tiny_patch16_224.augreg_in21k", head="new", frozen_blocks=0, linear_probe=False)
RAND = dict(policy="rand", n=2, m=9, color_jitter=0.0, erase=0.0)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("BATCH_SIZE=64", "TENSOR_SHAPE", (32, 197, 768)),
        ("IMG_SIZE=32", "SEQ_LENGTH", 5),
        ("parallel.pipeline=4", "NUM_MICRO_BATCHES", 4),
        ("parallel.pipeline=4", "TENSOR_SHAPE", (64, 197, 768)),
        ("TENSOR_PARALLEL_SIZE=4", "parallel", {"pipeline": 2, "tensor": {"mode": "1d", "size": 4}}),
        ("NUM_CHUNKS=2", "model", {"num_chunks": 2}),
        ("parallel.tensor.size=4", "parallel", {"pipeline": 2, "tensor": {"mode": "1d", "size": 4}}),
        ("parallel={'pipeline': 3}", "NUM_MICRO_BATCHES", 3),
        ("parallel=dict(tensor=dict(mode='1d', size=2))", "NUM_MICRO_BATCHES", 1),
        ("parallel=None", "NUM_MICRO_BATCHES", 1),
        ("fp16=dict(mode=AMP_TYPE.NAIVE, dtype='bf16')", "fp16", {"mode": AMP_TYPE.NAIVE, "dtype": "bf16"}),
        ("fp16={'mode': AMP_TYPE.TORCH}", "fp16", {"mode": AMP_TYPE.TORCH, "half_residual": False}),
        ("gradient_accumulation=2", "gradient_accumulation", 2),
        ("fp16.dtype='bf16'", "fp16", {"mode": AMP_TYPE.NAIVE, "dtype": "bf16"}),
        ("fp16.mode=AMP_TYPE.TORCH", "fp16", {"mode": AMP_TYPE.TORCH, "half_residual": False}),
        ("fp16=None", "fp16", None),
        ("TENSOR_SHAPE=(1, 2, 3)", "TENSOR_SHAPE", (1, 2, 3)),
        ("BATCH_SIZE=1", "TENSOR_SHAPE", (0, 197, 768)),  # refused for its BATCH_SIZE where there is a pipeline
        ("DATA='/a b=c'", "DATA", "/a b=c"),
        ("parallel.tensor=dict(mode=None)", "parallel", {"pipeline": 2, "tensor": {"mode": None, "size": 1}}),
        # strings without quotes, in whatever a literal may stand
        ("OPTIMIZER=lamb", "OPTIMIZER", "lamb"),
        ("DATA=/a b=c", "DATA", "/a b=c"),
        ("DATA=~/2024-images", "DATA", "~/2024-images"),
        ("finetune.weights=vit_tiny_patch16_224.augreg_in21k", "finetune", FINE_TUNED),
        ("finetune=dict(weights=a_b)", "finetune", {**FINE_TUNED, "weights": "a_b"}),
        ("parallel.tensor.mode=2.5d", "parallel", {"pipeline": 2, "tensor": {"mode": "2.5d", "size": 2, "depth": 1}}),
        ("parallel.tensor.mode=1d", "NUM_MICRO_BATCHES", 2),
        ("fp16.mode=torch", "fp16", {"mode": AMP_TYPE.TORCH, "half_residual": False}),
        ("fp16.mode='Apex'", "fp16", {"mode": AMP_TYPE.APEX}),
        ("fp16=dict(mode=NAIVE, dtype=bf16)", "fp16", {"mode": AMP_TYPE.NAIVE, "dtype": "bf16"}),
    ],
)
def test_derived_values_follow_an_override(load, override, key, value):
    assert load(TUTORIAL, override)[key] == value


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["SEED=1", "SEED=2", "SEED=3"], "SEED", 3),
        (["BATCH_SIZE=8", "BATCH_SIZE=64"], "TENSOR_SHAPE", (32, 197, 768)),
        (["parallel.pipeline=8", "parallel.pipeline=4"], "NUM_MICRO_BATCHES", 4),
        (["parallel.pipeline=8", "parallel=dict(tensor=dict(mode='1d', size=2))"], "NUM_MICRO_BATCHES", 1),
        (["fp16=None", "fp16.mode=torch"], "fp16", {"mode": AMP_TYPE.TORCH, "half_residual": False}),
        (["fp16.mode=torch", "fp16=None"], "fp16", None),
        (["LAMB_EXCLUDE_VECTORS=True", "LAMB_EXCLUDE_VECTORS=False"], "DECAY_VECTORS", True),
        (["dali.rand_augment={'n': 1, 'm': 3}", "dali.rand_augment={'n': 2}"], "augment", {**RAND, "n": 2, "m": 9}),
    ],
)
def test_of_two_overrides_the_last_one_counts(load, overrides, key, value):
    assert load(TUTORIAL, *overrides)[key] == value


@pytest.mark.parametrize(("written", "mode"), [("naive", "NAIVE"), ("Torch", "TORCH"), ("APEX", "APEX")])
def test_a_file_may_name_an_amp_mode_as_a_string(load, written, mode):
    needed = "BATCH_SIZE = 1\nNUM_EPOCHS = 1\n"
    assert load(f"{needed}fp16 = dict(mode={written!r})").fp16.mode is AMP_TYPE[mode]


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("BATCH_SIZE = 1\nif True:\n    BATCH_SIZE = 2\nBATCH_SIZE *= 3\nSEED = BATCH_SIZE", ["BATCH_SIZE=10"], 10),
        ("NUM_EPOCHS, SEED = 1, 2", ["SEED=5"], 5),
        ("for BATCH_SIZE in range(1, 4):\n    SEED = BATCH_SIZE", ["BATCH_SIZE=8"], 8),
        ("BATCH_SIZE = 1\nSEED = BATCH_SIZE", ["BATCH_SIZE=2", "BATCH_SIZE=3"], 3),
        ("BATCH_SIZE = 1\ndef _f(): return BATCH_SIZE\nSEED = _f()", ["BATCH_SIZE=2"], 2),
        ("from other import *\nSEED = BATCH_SIZE", ["BATCH_SIZE=2"], 2),
        ("from other import BATCH_SIZE as GLOBAL_BATCH\nSEED = GLOBAL_BATCH", ["GLOBAL_BATCH=2"], 2),
        ("globals()['BATCH_SIZE'] = 1\nSEED = BATCH_SIZE", ["BATCH_SIZE=2"], 2),
        ("parallel = {}\nparallel['pipeline'] = 2\nSEED = parallel['pipeline']", ["parallel.pipeline=8"], 8),
        ("parallel = {}\nparallel |= dict(pipeline=2)\nSEED = parallel['pipeline']", ["parallel.pipeline=8"], 8),
        ("parallel = {}\nparallel['pipeline'] = 2\nSEED = parallel['pipeline']", ["parallel=dict(pipeline=8)"], 8),
        (
            "parallel = {'tensor': {'size': 2}}\nSEED = parallel['tensor']['size']",
            ["parallel.tensor.size=8", "parallel.tensor.mode='1d'"],
            8,
        ),
    ],
)
def test_an_override_holds_wherever_its_name_is_bound(load, tmp_path, monkeypatch, text, overrides, expected):
    (tmp_path / "other.py").write_text("BATCH_SIZE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other", raising=False)
    assert expected == load(text, *overrides).SEED


# Older names: a file, overrides, and the values that they stand for, or the line that refuses them.
MIXUP, DECAY = "dali = dict(mixup_alpha=0.2)", "LAMB_EXCLUDE_VECTORS = True"
OLDER = [
    (MIXUP, [], {"mix.mixup": 0.2, "dali": {"gpu_aug": "auto", "hw_decoder_load": 0.65, "window": 32}}),
    (MIXUP, ["dali.mixup_alpha=0.4"], {"mix.mixup": 0.4}),
    (MIXUP, ["dali.mixup_alpha=0"], {"mix": None}),
    (MIXUP, ["mix.mixup=0.5"], {"mix.mixup": 0.5}),
    ("mix = dict(mixup=0.2)", ["dali.mixup_alpha=0.4"], {"mix.mixup": 0.4}),
    ("mix = dict(mixup=0.2, cutmix=1.0)", ["dali.mixup_alpha=0"], {"mix.mixup": 0, "mix.cutmix": 1.0}),
    ("mix = dict(mixup=0.2)", ["dali.mixup_alpha=0", "mix.mixup=0.5"], {"mix.mixup": 0.5}),
    (f"{MIXUP}\nmix = dict(mixup=0.2)", [], {"mix.mixup": 0.2}),
    (
        f"{MIXUP}\nmix = dict(mixup=0.5)",
        [],
        "dali.mixup_alpha = 0.2 is an older name of mix.mixup = 0.2, but mix.mixup = 0.5",
    ),
    (
        "",
        ["dali.mixup_alpha=0.2", "mix.mixup=0.5"],
        "--set: dali.mixup_alpha = 0.2 is an older name of mix.mixup = 0.2, but mix.mixup = 0.5",
    ),
    (
        "",
        ["dali.mixup_alpha=0.2", "mix=dict(mixup=0.5)"],
        "--set: dali.mixup_alpha = 0.2 is an older name of mix.mixup = 0.2, but mix.mixup = 0.5",
    ),
    ("", ["dali.mixup_alpha=0.2", "mix.mixup=0.2"], {"mix.mixup": 0.2}),
    ("dali = dict(rand_augment=dict(n=1))", [], {"augment.policy": "rand", "augment.n": 1, "augment.m": 9}),
    ("", ["dali.rand_augment={'n': 1, 'm': 3}"], {"augment.policy": "rand", "augment.n": 1, "augment.m": 3}),
    ("dali = dict(rand_augment=dict(n=1))\naugment = dict(policy='three')", [], "augment.policy = 'three': leave one"),
    (DECAY, [], {"DECAY_VECTORS": False}),
    (DECAY, ["LAMB_EXCLUDE_VECTORS=False"], {"DECAY_VECTORS": True}),
    ("DECAY_VECTORS = False", ["LAMB_EXCLUDE_VECTORS=False"], {"DECAY_VECTORS": True}),
    ("LAMB_EXCLUDE_VECTORS = False\nDECAY_VECTORS = False", [], {"DECAY_VECTORS": False}),
    (
        f"{DECAY}\nDECAY_VECTORS = True",
        [],
        "LAMB_EXCLUDE_VECTORS = True is an older name of DECAY_VECTORS = False, but DECAY",
    ),
    ("", ["fp16.mode=AMP_TYPE.TORCH", "fp16.init_scale=4"], {"fp16.initial_scale": 4, "fp16.mode": AMP_TYPE.TORCH}),
]


@pytest.mark.parametrize(("text", "overrides", "expected"), OLDER)
def test_an_older_name_sets_what_it_stands_for(load, text, overrides, expected):
    needed = "BATCH_SIZE = 2\nNUM_EPOCHS = 1\n"
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)) as error:
            load(needed + text, *overrides, script=IMAGENET)
        assert "\n" not in str(error.value)
    else:
        config = load(needed + text, *overrides, script=IMAGENET)
        for key, value in expected.items():
            assert functools.reduce(lambda block, part: block[part], key.split("."), config) == value, key
        assert not [name for name, *_ in older_names(config)]


def test_an_earlier_runs_record_is_compared_as_it_would_be_now(load):
    """It may have older names, and lack keys that came later, and defaults in blocks."""
    now = load(
        "BATCH_SIZE = 4\nNUM_EPOCHS = 1\nema = {}\nmix = dict(mixup=0.2)\nDECAY_VECTORS = False",
        "fp16=dict(mode=AMP_TYPE.TORCH, half_residual=False)",
        script=IMAGENET,
    )
    before = configs.plain(now)
    for key in ("OPTIMIZER", "DECAY_VECTORS", "REPEATS", "checkpoint", "mix", "zero", "EVAL_CROP", "bce"):
        del before[key]
    before |= {"LAMB_EXCLUDE_VECTORS": True, "dali": {"gpu_aug": True, "mixup_alpha": 0.2}, "ema": {"decay": 0.9999}}
    before["fp16"] = {"mode": "AMP_TYPE.TORCH"}
    schema = schemas.schema(IMAGENET)
    assert changed_values(before, now, schema).keys() == {"dali"}, "gpu_aug is 'auto' now"
    before |= {"ema": {"decay": 0.9}, "REPEATS": 3, "dali": {"gpu_aug": True}, "parallel": {"pipeline": 2}}
    changed = changed_values(before, now, schema)
    assert changed.keys() == {"ema", "REPEATS", "mix", "dali", "parallel"}
    assert changed["REPEATS"] == [3, 1]
    assert [key for key in changed if not configs.affects_training(key, *changed[key], schema)] == ["dali", "parallel"]
    window = changed_values(before | {"dali": {"gpu_aug": True, "window": 8}}, now, schema)["dali"]
    assert configs.affects_training("dali", *window, schema)


def test_a_value_in_a_file_may_stay_when_the_command_line_takes_its_need_away(load):
    assert load("OPTIMIZER = 'sgd'\nMOMENTUM = 0.5", "OPTIMIZER='lamb'").OPTIMIZER == "lamb"
    with pytest.raises(UserError, match=r"MOMENTUM = 0\.5 does nothing with OPTIMIZER = 'lamb'"):
        load("OPTIMIZER = 'lamb'\nMOMENTUM = 0.5")


def test_a_value_in_a_block_goes_when_the_command_line_takes_its_need_away(load):
    """Otherwise NAIVE's hysteresis would be that of TORCH."""
    naive = "from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.NAIVE, hysteresis=3)"
    assert load(naive, "fp16.mode=AMP_TYPE.TORCH").fp16 == {"mode": AMP_TYPE.TORCH, "half_residual": False}
    assert load(naive, "fp16.mode=None").fp16 is None
    deep = "parallel = dict(tensor=dict(mode='2.5d', size=8, depth=2))"
    assert load(deep, "parallel.tensor.mode='1d'").parallel.tensor == {"mode": "1d", "size": 8}
    for given in (["fp16.mode=AMP_TYPE.TORCH", "fp16.hysteresis=3"], ["fp16=dict(mode=AMP_TYPE.TORCH, hysteresis=3)"]):
        with pytest.raises(UserError, match=r"fp16\.hysteresis = 3 does nothing with fp16\.mode = AMP_TYPE\.TORCH"):
            load(naive, *given)


def test_none_leaves_out_a_key_without_a_default(load):
    file = "GLOBAL_BATCH = 64\ncheckpoint = dict(every_steps=5)"
    assert load(file, "GLOBAL_BATCH=None", "checkpoint.every_steps=None") == load("")
    assert load(file, "checkpoint=dict(every_steps=None)") == load("GLOBAL_BATCH = 64")
    scaled = "fp16 = dict(mode='naive', initial_scale=4)"
    assert load(scaled, "fp16.init_scale=None") == load("fp16 = dict(mode='naive')")
    with pytest.raises(UserError, match="BATCH_SIZE = None, but it must be a whole number"):
        load("BATCH_SIZE = 3", "BATCH_SIZE=None", script=IMAGENET)


def test_a_value_stays_as_it_is_written(load):
    """So that config.json says what the file does: no 1.0 for 1."""
    for key, values in {"WEIGHT_DECAY": ("1", "1.0", "0"), "MEAN": ("[1, 0.5, 1.0]", "(1, 0.5, 1.0)")}.items():
        for value in values:
            assert repr(load(f"{key} = {value}")[key]) == value


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (bool, "OWN = 'x', but it must be <class 'bool'>"),
        (Literal["a", "b"], "OWN = 'x', but it must be typing.Literal['a', 'b']"),
        (Annotated[int, Field(description="even", multiple_of=2)], "OWN = 'x', but it must be even"),
    ],
)
def test_a_loaders_setting_may_have_any_type_of_pydantic(tmp_path, kind, words):
    (tmp_path / "config.py").write_text("OWN = 'x'")
    with pytest.raises(UserError, match=re.escape(words)):
        configs.load(tmp_path / "config.py", (), {"OWN": Setting(kind, "a loader's own")})


def test_keys_that_a_script_ignores_are_no_change_of_a_run(load):
    """Earlier runs recorded them."""
    now = load(TUTORIAL_DATA_PARALLEL, script=DP)
    assert now.dali == {"gpu_aug": True, "mixup_alpha": 0.2}
    for key in configs.idle_keys(now, schemas.schema(DP)):
        del now[key]
    before = {**configs.plain(now), "dali": {"gpu_aug": False}, "model": {"num_chunks": 1}}
    assert changed_values(before, now, schemas.schema(DP)) == {}


def test_a_file_may_begin_with_a_byte_order_mark(load):
    """As editors on Windows write it, and Python reads it."""
    assert load("\ufeffBATCH_SIZE = 3").BATCH_SIZE == 3


def test_helpers_are_not_settings(load):
    text = "import math\nfrom math import sqrt\n_side = 4\ndef f(): return 2\nBATCH_SIZE = int(sqrt(16)) * _side"
    text += "\nfrom colossalai.amp import AMP_TYPE as AMP\nF = math\nclass MLP: pass\nscale = lambda x: x"
    assert set(load(text)) == {"BATCH_SIZE", *configs.complete({}, schemas.any_key())}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "from torch.optim import SGD\nOPTIMIZER = SGD",
            "OPTIMIZER = <class 'torch.optim.sgd.SGD'>, but it must be one of",
        ),
        ("def LEARNING_RATE(step): return 1e-3", "LEARNING_RATE = <function LEARNING_RATE"),
        ("fp16 = dict", "fp16 = <class 'dict'>, but it must be a dict(mode, "),
        ("import math as DATA", "DATA = <module 'math'"),
        ("LAMB_EXCLUDE_VECTORS = bool", "LAMB_EXCLUDE_VECTORS = <class 'bool'>, but it must be True or False"),
    ],
)
def test_classes_functions_and_modules_under_a_keys_name_are_refused(load, text, words):
    with pytest.raises(UserError, match=re.escape(words)) as error:
        load(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("BATCH_SIZ = 1", (), ("BATCH_SIZ", "did you mean BATCH_SIZE")),
        ("batch_size = 1", (), ("batch_size", "BATCH_SIZE")),
        ("from torch.optim import SGD\nOPTIMISER = SGD", (), ("OPTIMISER", "did you mean OPTIMIZER")),
        ("def LERNING_RATE(step): return 1e-3", (), ("LERNING_RATE", "did you mean LEARNING_RATE")),
        ("parallel = dict(pipelin=2)", (), ("parallel.pipelin", "did you mean pipeline")),
        ("parallel = dict(tensor=dict(mode='4d', size=2))", (), ("parallel.tensor.mode = '4d'", "'1d'")),
        ("parallel = 2", (), ("parallel = 2", "dict(pipeline, tensor)")),
        ("BATCH_SIZE = '64'", (), ("BATCH_SIZE = '64'", "whole number")),
        ("BATCH_SIZE = True", (), ("BATCH_SIZE = True", "whole number")),
        ("BATCH_SIZE = 0", (), ("BATCH_SIZE = 0", "at least 1")),
        ("DROP_RATE = 1.0", (), ("DROP_RATE = 1.0", "not including, 1")),
        ("LEARNING_RATE = float('nan')", (), ("LEARNING_RATE = nan", "above 0")),
        ("CHECKPOINT = 1", (), ("CHECKPOINT = 1", "True or False")),
        ("fp16 = dict(mode='torhc')", (), ("fp16.mode = 'torhc'", "AMP_TYPE.TORCH", "did you mean TORCH?")),
        (
            "from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.APEX, opt_level='O4')",
            (),
            ("fp16.opt_level = 'O4'", "'O3'"),
        ),
        (
            "from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.TORCH, hysteresis=2)",
            (),
            ("fp16.hysteresis", "AMP_TYPE.TORCH"),
        ),
        ("x = 1", (), ("unknown key x", "starts with _")),
        ("BATCH_SIZE = ", (), ("config.py:1", "not valid Python")),
        ("\nBATCH_SIZE = NUM // 2", (), ("config.py:2", "NameError", "NUM")),
        ("import no_such_module", (), ("config.py:1", "ModuleNotFoundError")),
        ("", ("BATCH_SIZE",), ("--set BATCH_SIZE", "KEY=VALUE")),
        ("", ("=3",), ("--set =3", "KEY=VALUE")),
        ("", ("parallel..size=3",), ("KEY=VALUE",)),
        ("", ("OPTIMIZER=lamp",), ("OPTIMIZER = 'lamp'", "one of 'adamw'", "did you mean lamb?")),
        ("", ("OPTIMISER=lamb",), ("unknown key OPTIMISER", "did you mean OPTIMIZER?")),
        ("", ("augment.policy=RAND",), ("augment.policy = 'RAND'", "did you mean rand?")),
        ("", ("fp16.mode=nave",), ("fp16.mode = 'nave'", "did you mean NAIVE?")),
        ("", ("fp16=dict(mode=nave)",), ("fp16.mode = 'nave'", "did you mean NAIVE?")),
        ("", ("OPTIMIZER=None",), ("OPTIMIZER = None", "one of 'adamw'")),
        ("", ("DATA=7",), ("DATA = 7", "a string")),
        ("", ("DATA='/data",), ('"\'/data" is not a Python literal',)),
        ("", ("DATA=",), ("'' is not a Python literal",)),
        ("", ("SEED=2*3",), ("SEED = '2*3'", "whole number")),
        ("", ("fp16.mode=AMP_TYPE.BEST",), ("AMP_TYPE.BEST", "AMP_TYPE.TORCH")),
        ("", ("fp16=dict(mode=AMP_TYPE.BEST)",), ("AMP_TYPE.BEST", "AMP_TYPE.TORCH")),
        ("", ("parallel=dict",), ("parallel = 'dict'", "dict(pipeline, tensor)")),
        ("", ("SEED=" + "[" * 10_000,), ("SEED=[", "is not a Python literal")),
        ("BATCH_SIZE = 10**5000", (), ("BATCH_SIZE = <int>", "whole number")),
        ("parallel = {1: 2}", (), ("unknown key parallel.1",)),
        ("raise SystemExit('enough')", (), ("config.py:1", "SystemExit: enough")),
        ("TF32 = 'a\\nb'", (), ("TF32 = 'a\\nb'",)),
        ("raise ValueError('a\\nb')", (), ("ValueError: a b",)),
        ("zero = dict(stage=True)", (), ("zero.stage = True", "one of 1, 2")),
        ("COMPILE = 1", (), ("COMPILE = 1", "one of False, True, 'auto'")),
        ("DEPTH = 3.0", (), ("DEPTH = 3.0", "whole number")),
        ("WEIGHT_DECAY = 1e-38", (), ("WEIGHT_DECAY = 1e-38", "0, or 1e-30 to 1e30")),
        ("import numpy\nWEIGHT_DECAY = numpy.float32(0.1)", (), ("WEIGHT_DECAY = ", "a number of at least 0")),
        ("LEARNING_RATE = 2**53 + 1", (), ("LEARNING_RATE = 9007199254740993", "a number above 0")),
        ("TENSOR_SHAPE = (1, 2)", (), ("TENSOR_SHAPE = (1, 2)", "three whole numbers")),
        ("TENSOR_SHAPE = [1, 2, True]", (), ("TENSOR_SHAPE = [1, 2, True]", "three whole numbers")),
        ("TENSOR_SHAPE = {1, 2, 3}", (), ("TENSOR_SHAPE = {1, 2, 3}", "three whole numbers")),
        ("CROP_AREA = (0.5, 0.25)", (), ("CROP_AREA = (0.5, 0.25)", "smallest <= largest")),
        ("ELASTIC_LAYOUTS = [{}, 2]", (), ("ELASTIC_LAYOUTS = [{}, 2]", "a list of dicts")),
        ("import enum\nfp16 = dict(mode=enum.Enum('AMP', {'NAIVE': 'naive'}).NAIVE)", (), ("fp16.mode = AMP.NAIVE",)),
        ("dali = dict(rand_augment=dict(n=0))", (), ("dali.rand_augment.n = 0", "from 1 to 20")),
        ("fp16 = dict(dtype='bf16')", (), ("fp16 = {'dtype': 'bf16'} does nothing", "set fp16.mode")),
        ("fp16 = dict(mode=None, dtype='bf16')", (), ("fp16.dtype = 'bf16' does nothing", "set fp16.mode")),
        ("SCHEDULE = 'linear'\nMIN_LEARNING_RATE = 0.1", (), ("MIN_LEARNING_RATE = 0.1 does nothing", "for 'cosine'")),
        ("mix = dict(mixup=0.8, switch_prob=0.1)", (), ("mix.switch_prob = 0.1 does nothing", "set mix.cutmix")),
        ("", ("BATCH=3",), ("unknown key BATCH", "BATCH_SIZE")),
    ],
)
def test_config_with_a_mistake_is_refused_by_key_and_value(load, text, overrides, words):
    with pytest.raises(UserError) as error:
        load(text, *overrides)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_required_key_missing_is_refused_and_others_get_the_same_default_everywhere(load):
    """Defaults are the same in all scripts, in blocks too; a model of one's own needs sizes, since it has no MODEL."""
    with pytest.raises(UserError, match="NUM_EPOCHS is missing; it must be a whole number of at least 1"):
        load("BATCH_SIZE = 1", script=IMAGENET)
    with pytest.raises(UserError, match="PATCH_SIZE is missing; it must be a whole number from 1 to 8192"):
        load("BATCH_SIZE = 1\nNUM_EPOCHS = 2", script=HYBRID)
    loaded = {script: load(with_value(script, ("ema",), "dict(decay=0.5)"), script=script) for script in SCRIPTS}
    shared = set.intersection(*map(set, loaded.values())) - set.union(*map(set, COMPLETE.values()))
    assert len(shared) > 30
    for config in loaded.values():
        assert {key: config[key] for key in shared} == {key: loaded[DP][key] for key in shared}
        assert config.ema == {"decay": 0.5, "warmup": False}
        assert config.checkpoint == {"every_minutes": 30, "keep": 3}
    assert "MLP_RATIO" not in loaded[CALTECH101]
    assert loaded[HYBRID].POOL == "token"


def test_the_page_of_all_keys_is_what_the_schema_says():
    """`python scripts/configuration.py > docs/configuration.md` writes it."""
    (reference,) = fork_ranks.run("scripts/configuration.py", []).stdout
    assert (ROOT / "docs/configuration.md").read_text() == reference
    assert all(f"| `{key}` |" in reference for key in [*schemas.any_key(), *schema.OLDER_NAMES])


@pytest.mark.parametrize(
    ("parallel", "world_size", "expected"),
    [
        ({"pipeline": 2}, 4, "data 2 × pipeline 2 × tensor 1"),
        ({"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}, 4, "data 1 × pipeline 2 × tensor 2 (1d)"),
        ({}, 3, "data 3 × pipeline 1 × tensor 1"),
        ({"pipeline": 2}, 3, "start 2 or 4 processes"),
        ({"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}, 2, "start 4 processes"),
        ({"tensor": {"mode": None, "size": 2}}, 2, "needs parallel.tensor.mode = '1d'"),
    ],
)
def test_layout_of_a_world_size_is_the_product_or_is_refused(load, parallel, world_size, expected):
    config = load(f"parallel = {parallel!r}")
    if "start" in expected or "needs" in expected:
        with pytest.raises(UserError, match=re.escape(expected)):
            Layout.of(config, world_size)
    else:
        assert str(Layout.of(config, world_size)) == expected


def test_json_has_modes_by_name_and_tuples_as_lists(load):
    found = json.loads(configs.to_json(load(TUTORIAL)))
    assert found["fp16"] == {"mode": "AMP_TYPE.NAIVE"}
    assert found["TENSOR_SHAPE"] == [128, 197, 768]


# ---------------------------------------------------------------------------------------------------------------------
# Every key with values that are wrong, and with the last ones that are right
# ---------------------------------------------------------------------------------------------------------------------

COMPLETE = {  # the smallest config of each script
    DP: dict(NUM_EPOCHS=60, BATCH_SIZE=8, DEPTH=1, NUM_CLASSES=10),
    HYBRID: dict(
        NUM_EPOCHS=60, BATCH_SIZE=8, NUM_CLASSES=10, IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=32, DEPTH=2, NUM_HEADS=2
    ),
    CALTECH101: dict(NUM_EPOCHS=60, BATCH_SIZE=8, DEPTH=1, NUM_CLASSES=9),
    IMAGENET: dict(NUM_EPOCHS=60, BATCH_SIZE=8, DEPTH=1, NUM_CLASSES=9, MODEL="vit_tiny_patch16_224"),
}
WRONG = ["''", r"'a\0b'", "None", "[]", "float('nan')", "float('inf')", "-float('inf')"]
WRONG += ["10**400", "-(10**400)", "2**63"]


def settings_of(settings, path=()):
    """Every setting and block that a script takes, by its path."""
    for key, setting in settings.items():
        if not isinstance(setting, Ignored):
            yield (*path, key), setting
            if isinstance(setting, SettingsBlock):
                yield from settings_of(setting.settings, (*path, key))
    if not path:
        for name in schema.OLDER_NAMES:
            if not isinstance(settings.get(name.split(".")[0]), Ignored) and (
                found := schema.setting_at(name, settings)
            ):
                yield tuple(name.split(".")), found


def with_value(script, path, value):
    """A config of a script, in which one setting has this value, and what that needs."""
    name, *rest = path
    for key in reversed(rest):
        value = f"{{{key!r}: {value}}}"
    return "\n".join([*(f"{key} = {default!r}" for key, default in COMPLETE[script].items()), f"{name} = {value}"])


def test_values_that_no_setting_may_have_are_refused_in_one_line(load):
    """In a file, and on the command line as far as they are literals."""
    takers = {path: (script, setting) for script in SCRIPTS for path, setting in settings_of(schemas.schema(script))}
    assert len(takers) > 100
    wrong = []
    for path, (script, setting) in takers.items():
        values = list(WRONG)
        if (
            isinstance(setting, SettingsBlock)
            or setting.default is OPTIONAL
            or path[-1] in ("mode", "TENSOR_PARALLEL_MODE")
        ):
            values.remove("None")  # is off, or left out
        if found := ends(setting):
            low, high = found
            whole = setting.type.__origin__ is int
            values += [repr(low - 1), repr(high + 1)] if whole else [repr(beyond(low, -1)), repr(beyond(high, 1))]
        for value in values:
            ways = [(with_value(script, path, value), ())]
            if "float" not in value and "**" not in value:
                ways.append((with_value(script, ("SEED",), 1), (f"{'.'.join(path)}={value}",)))
            for text, overrides in ways:
                try:
                    load(text, *overrides, script=script)
                    wrong.append(f"{'.'.join(path)} = {value} is allowed")
                except UserError as error:
                    message = str(error)
                    if "\n" in message or path[-1] not in message or len(message) > 600:
                        wrong.append(message)
    assert not wrong, "\n".join(wrong)


def ends(setting):
    """The smallest and the largest number that a setting may be, if it must be a number."""
    limits = FieldInfo.from_annotation(setting.type).metadata if isinstance(setting, Setting) else ()
    limits = {type(limit): limit for limit in limits}
    if Ge not in limits:
        return ()
    return limits[Ge].ge, limits[Le].le if Le in limits else math.nextafter(limits[Lt].lt, 0)


def beyond(end, sign):
    """A number just beyond the end of a range, as floats and float32 know it."""
    return end + sign * max(abs(end) * 1e-3, 1e-37)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_ends_of_every_range_work_or_are_refused(load, script):
    """With whatever is made of them: model, samples, crops, augmentation, loss, an optimizer step, its rate."""

    def try_all():
        wrong = []
        for path, setting in settings_of(schemas.schema(script)):
            for value in ends(setting):
                try:
                    use(load(with_value(script, path, repr(value)), script=script), script)
                except UserError:
                    pass
                except Exception as error:
                    wrong.append(f"{'.'.join(path)} = {value}: {type(error).__name__}: {error}")
        return wrong

    (wrong,) = fork_ranks.call(try_all)
    assert not wrong, "\n".join(wrong)


def use(config, script):
    """What a script makes of a config before and in its first step, with little data."""
    layout = Layout.of(config, config.parallel.pipeline * config.parallel.tensor.size)
    (check_vit if script == HYBRID else check_timm_vit)(config, layout)
    sampler = GlobalBatchSampler(
        1000, config.BATCH_SIZE, config.gradient_accumulation, config.SEED, repeats=config.REPEATS
    )
    images, labels = torch.zeros(1000, 3, 32, 32, dtype=torch.uint8), torch.zeros(1000, dtype=torch.int64)
    if script != CALTECH101:
        little = Config({"CROP_PADDING": 4, **config, "IMG_SIZE": min(config.IMG_SIZE, 64)})
        loader = Cifar10Loader(images, labels, sampler, little, torch.device("cpu"))
        loader = with_mixup(loader, config) if "mix" in config else loader
        assert next(iter(loader))[0].isfinite().all()
    if script == CALTECH101:
        assert draw_crops(8, config.CROP_AREA, config.FLIP, torch.Generator()).isfinite().all()
    model = torch.nn.Linear(4, min(config.NUM_CLASSES, 100))
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer, 10)
    model, _ = wrap_model(model, None, config.fp16, torch.device("cpu"))
    optimizer = wrap_optimizer(optimizer, config.fp16, torch.device("cpu"))
    loss = build_criterion(config)(model(torch.ones(2, 4)).float(), torch.zeros(2, dtype=torch.int64))
    optimizer.backward(loss)
    optimizer.clip_grad_by_norm(config.clip_grad_norm)
    optimizer.step()
    scheduler.step()
