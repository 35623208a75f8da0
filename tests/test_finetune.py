"""Fine-tuning: where weights come from, what is trained of them, and that the layout makes no difference."""

import hashlib
import http.server
import json
import re
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub.constants
import pytest
import timm
import torch
import torch.nn.functional as F
from colossal_vit import config as configs
from colossal_vit.checkpoint import __main__ as cli
from colossal_vit.checkpoint import storage, tensors, weights
from colossal_vit.checkpoint.checkpointer import Checkpointer
from colossal_vit.checkpoint.tensors import parameter_slots
from colossal_vit.checkpoint.weights import PATCHES
from colossal_vit.engine import Trainer, build_optimizer, initialize, optimizers
from colossal_vit.errors import UserError
from colossal_vit.launch.flags import parse
from colossal_vit.model.timm_vit import PatchProjection, build_timm_vit
from colossal_vit.parallel import sharding
from colossal_vit.parallel.collectives import RankLogger, run_on_rank_0
from colossal_vit.parallel.layout import Layout
from colossal_vit.results import read_metrics
from colossal_vit.run import Run
from colossalai.context import Config
from colossalai.legacy import nn as col_nn
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.nn.layer.parallel_3d import _utils as parallel_3d_utils
from safetensors.torch import load, load_file, save, save_file

import cifar10
import conftest
import fork_ranks
import schemas
import test_layouts
import training
import vit
from layouts import LAYOUTS, OPTIMIZERS
from layouts import MODEL as SMALL_MODEL

MODEL = {
    **SMALL_MODEL,
    **dict(MLP_RATIO=4, NUM_CLASSES=10, DROP_RATE=0.0, DROP_PATH_RATE=0.0, OPTIMIZER="adamw", WEIGHT_DECAY=0.1),
    **dict(SEED=0, BATCH_SIZE=8),
}
KEEP = {"finetune.head": "keep"}
HALF = [0.5] * 3, [0.5] * 3  # mean and deviation of timm's augreg models
TINY = dict(IMG_SIZE=32, PATCH_SIZE=16, HIDDEN_SIZE=192, DEPTH=12, NUM_HEADS=3)  # vit_tiny_patch16_224 on 32 px
IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8)


def full_vit(**values):
    return vit.full_vit(Config(configs.complete({**MODEL, **values}, schemas.schema(schemas.HYBRID))))


def full_weights(**values):
    """Full weights of a ViT, all of them random."""
    with pytest.MonkeyPatch.context() as patch:
        conftest.random_start(patch)
        return full_vit(SEED=5, **values).state_dict()


def call(function, world_size=1, **values):
    """What `function` returns on every rank, in a layout of `MODEL`, and with other values."""
    return training.call(function, world_size, **{**MODEL, **values})


def build_engine():
    config = gpc.config
    layout = Layout.of(config, torch.distributed.get_world_size())
    model = build_timm_vit(config) if "MODEL" in config else vit.build_vit(config, layout)
    engine, *_ = initialize(model, build_optimizer(config, model), col_nn.CrossEntropyLoss())
    log = RankLogger(torch.distributed.get_rank())
    return engine, Run(parse([]), config, layout, Path(), torch.device("cpu"), log)


def read_config(output):
    return json.loads((output / "config.json").read_text())


def start_from(run, engine):
    """Load the weights of the block `finetune`."""
    checkpointer = Checkpointer(run)
    run_on_rank_0(checkpointer._normalization)  # finds them; `prepare` does so, and locks a run directory
    checkpointer.trainer = Trainer(engine)
    checkpointer._start_from_weights()  # `load` does so, and begins in the run directory


def start():
    """Start from `finetune.weights`; returns the weights, and the logits of `IMAGES`."""
    engine, run = build_engine()
    ema = engine.ema  # an evaluation has none
    start_from(run, engine)
    engine.eval()
    with torch.no_grad():
        logits = engine(IMAGES)
    slots = parameter_slots(engine)
    for slot in slots:
        assert torch.equal(slot.working, slot.master.to(slot.working.dtype))
        assert torch.equal(slot.master, ema.averages[slot.master]), "averages start from the weights"
    return {slot.shard.name: slot.shard.gather(slot.master) for slot in slots}, logits


def started(weights, **values):
    """What `start` finds in a process of its own."""
    (found,) = call(start, **{"ema": {}, "finetune.weights": str(weights), **values})
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def trained(found, expected):
    """The names of tensors that differ."""
    return {name for name, tensor in expected.items() if not torch.equal(found[name], tensor)}


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hugging Face Hub does where it serves files of a repository.

    Attributes:
        files: the contents, by path; asked: the requests for others and these, as "METHOD path".
    """

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self, with_body=False):
        body = self.files.get(self.path)
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", f'"{hashlib.sha256(body or b"").hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if with_body:
            self.wfile.write(body or b"")

    def do_GET(self):
        self.do_HEAD(with_body=True)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A server in place of the Hugging Face Hub, with weights of some of timm's models, and an empty cache."""
    for name, num_classes, depth in [
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", 1000, 12),
        ("vit_tiny_patch16_384.augreg_in21k_ft_in1k", 10, 2),
        ("vit_base_patch16_224.augreg_in21k", 21843, 2),
    ]:
        tensors = full_weights(**{**TINY, "IMG_SIZE": 224, "NUM_CLASSES": num_classes, "DEPTH": depth})
        Hub.files[f"/timm/{name}/resolve/main/model.safetensors"] = save(tensors)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address, constants = f"http://127.0.0.1:{server.server_port}", huggingface_hub.constants
        # The environment variables of these names are read at import.
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "ENDPOINT", address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield Hub
        server.shutdown()


def test_config_finetune_fetches_weights_and_trains_on_images_as_they_have_seen_them(hub, tmp_path):
    """As its command says, but for a smaller model of the weights that the hub has; fetched once."""
    sizes = {**TINY, "DEPTH": 2, "BATCH_SIZE": 32, "fp16": None, "finetune.frozen_blocks": 2}
    for steps in (1, 2):
        options = dict(script=training.CALTECH101, config="config/config_finetune.py", small=False)
        run = training.train(tmp_path / str(steps), steps=steps, **options, **sizes)
        assert "starting from the weights of vit_base_patch16_224.augreg_in21k, with a new head" in run.said
        config = read_config(run.output)
        assert (config["MEAN"], config["STD"]) == HALF
    assert [step["step"] for step in run.steps] == [1, 2]
    served = load(hub.files["/timm/vit_base_patch16_224.augreg_in21k/resolve/main/model.safetensors"])
    assert torch.equal(saved(run.output)[PATCHES], served[PATCHES]), "it is frozen"
    assert [asked for asked in hub.asked if "vit_base_patch16_224" in asked and asked.startswith("GET")] == [
        "GET /timm/vit_base_patch16_224.augreg_in21k/resolve/main/model.safetensors"
    ]


@pytest.mark.parametrize(
    ("name", "head", "num_classes"),
    [("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "keep", 1000), ("vit_tiny_patch16_224", "new", 10)],
)
def test_weights_by_a_name_of_timm_are_those_that_timm_loads(name, head, num_classes, hub):
    """As timm itself loads them at another image size, into our model and into timm's."""
    theirs = timm.create_model(name, pretrained=True, img_size=32, num_classes=num_classes).eval()
    if head == "new":
        torch.nn.init.zeros_(theirs.head.weight)
        torch.nn.init.zeros_(theirs.head.bias)
    theirs.patch_embed.proj = PatchProjection(theirs.patch_embed.proj)  # as in both of ours, for it rounds differently
    with torch.no_grad():
        expected = theirs(IMAGES)
    values, finetune = {**TINY, "NUM_CLASSES": num_classes}, {"weights": name, "head": head}
    timms = {**MODEL, **values, "MODEL": "vit_tiny_patch16_224", "ema": {}, "finetune": finetune}
    found = (started(name, finetune=finetune, **values), *fork_ranks.call(start, **timms))
    for state, logits in found:
        assert_same(state, theirs.state_dict())
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (logits.abs().max() > 0.1) == (head == "keep")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(full_weights(), path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "run"
    training.train(output, steps=1)
    return output


HALF_CONFIG = '{"pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}'  # as timm writes it
OTHER_MEAN = [0.4, 0.5, 0.6]


@pytest.mark.parametrize("where", ["run", "folder", "name", "file"])
def test_normalisation_of_weights_is_found_where_it_is_recorded(where, file, run, tmp_path):
    shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text(HALF_CONFIG)
    source = {"run": run, "folder": tmp_path, "name": "vit_tiny_patch16_224.augreg_in21k", "file": file}[where]
    expected = {"run": (cifar10.MEAN, cifar10.STD), "file": None}.get(where, HALF)
    found = weights.find_state(weights.find(str(source))).get("normalization")
    assert (found and tuple(map(list, found))) == (expected and tuple(map(list, expected)))


def test_a_run_normalises_its_images_as_its_weights_have_seen_them(file, run, few_test_images, tmp_path):
    """It resumes so if the weights are gone; the config's own values win, and are no other values than recorded."""
    start = tmp_path / "start"
    start.mkdir()
    shutil.copy(file, start)
    (start / "config.json").write_text(HALF_CONFIG)
    values = {"finetune.weights": str(start)}
    for mean, given in ((HALF[0], {}), (OTHER_MEAN, {"MEAN": OTHER_MEAN})):
        output = tmp_path / str(mean[0])
        training.train(output, steps=1, **values, **given)
        assert read_config(output)["MEAN"] == mean
        assert read_config(output)["STD"] == HALF[1]
    shutil.rmtree(start)
    resumed = training.train(tmp_path / "0.5", steps=2, **values)
    assert "changed since then" not in resumed.said
    assert read_config(tmp_path / "0.5")["MEAN"] == HALF[0]
    refused = training.refused(tmp_path / "0.5", steps=3, MEAN=OTHER_MEAN, **values)
    assert "other values (MEAN [0.5, 0.5, 0.5] → [0.4, 0.5, 0.6])" in refused


def test_weights_at_a_path_win_over_a_name_of_timm(file, run, tmp_path, monkeypatch):
    """A file, a folder of timm's, a run, a checkpoint; a path wins over timm's model of the same name."""
    shutil.copytree(file.parent, tmp_path / "vit_tiny_patch16_224")
    monkeypatch.chdir(tmp_path)
    for path in (file, file.parent, "vit_tiny_patch16_224"):
        assert_same(started(path, **KEEP)[0], load_file(file))
    (checkpoint,) = (run / storage.FOLDER).iterdir()
    for path in (run, checkpoint):
        assert_same(started(path, **KEEP)[0], load_file(checkpoint / storage.MODEL))


@pytest.mark.parametrize("amp", ["NAIVE", "TORCH"])
def test_master_weights_start_from_the_loaded_weights_in_half_precision(amp, file):
    half = {"finetune.frozen_blocks": 2, "fp16.dtype": "bf16"}
    assert_same(started(file, **KEEP, **half, amp=amp)[0], load_file(file))


def test_average_pooling_has_a_new_norm(file):
    """As MAE is fine-tuned: the norm before the pooling goes, one behind it comes."""
    found, _ = started(file, **KEEP, POOL="avg")
    expected = load_file(file)
    del expected["norm.weight"], expected["norm.bias"]
    assert_same(found, expected | {"fc_norm.weight": torch.ones(32), "fc_norm.bias": torch.zeros(32)})


def test_average_pooling_is_exported(tmp_path, capsys):
    training.train(tmp_path / "run", steps=1, POOL="avg", DEPTH=1)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "folder")]) == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert model.global_pool == "avg"
    assert_same(model.state_dict(), saved(tmp_path / "run"))


def without(weights, *names):
    return {name: tensor for name, tensor in weights.items() if name not in names}


@pytest.fixture(scope="module")
def wrong_files(file, hub, tmp_path_factory):
    folder, weights = tmp_path_factory.mktemp("mistakes"), load_file(file)
    for name, wrong in {
        "no_vit": {"fc.weight": torch.zeros(2, 2)},
        "no_head": without(weights, "head.weight", "head.bias"),
        "distilled": {**weights, "dist_token": torch.zeros(1)},
        "no_dinov2": {PATCHES: weights[PATCHES], "mask_token": torch.zeros(1), "register_tokens": torch.zeros(1)},
        "no_width": {**weights, PATCHES: torch.zeros(0, 3, 8, 8)},
        "no_patch": {**weights, PATCHES: torch.zeros(32, 3, 0, 0)},
        "scalar": {**weights, PATCHES: torch.tensor(1.0)},
        "grey": {**weights, PATCHES: torch.zeros(32, 1, 8, 8)},
        "no_bias": {**weights, "patch_embed.proj.bias": torch.zeros(0)},
        "scalar_head": {**weights, "head.weight": torch.tensor(1.0)},
        "no_norm_bias": without(weights, "norm.bias"),
        "no_embedding": {**weights, "pos_embed": torch.zeros(1, 10, 0)},
    }.items():
        save_file(wrong, folder / f"{name}.safetensors")
    (folder / "damaged.safetensors").write_bytes(file.read_bytes()[:-1])
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("source", "head", "said"),
    [
        ("vit_tiny_patch16_225", "new", "no pretrained model of timm; did you mean vit_tiny_pa"),
        ("vit_tiny_patch16_224.augreg", "new", "no pretrained model of timm; did you mean vit_tiny_patch16_224.augre"),
        ("vit_huge_patch14_gap_224", "new", "timm has no weights of it on the Hugging Face Hub"),
        ("vit_small_patch16_224", "new", "cannot be fetched from timm/vit_small_patch16_224.augreg_in21k_ft_in1k on"),
        ("vit_tiny_patch16_224", "new", "has patches of 16 px, but this model's are of 8 px"),
        ("{}/no_head.safetensors", "keep", "has no head, but finetune.head = 'keep' needs one for NUM_CLASSES = 10"),
        ("{}/no_vit.safetensors", "new", "not a Vision Transformer with names of timm, tor"),
        ("{}/distilled.safetensors", "new", "has a dist_token: a distilled model has two class tokens"),
        ("{}/no_dinov2.safetensors", "new", "names cannot be converted to timm's: KeyError: 'cls_token'"),
        ("{}/no_width.safetensors", "new", "patch_embed.proj.weight is of shape (0, 3, 8, 8), which is not (width, 3"),
        ("{}/no_patch.safetensors", "new", "patch_embed.proj.weight is of shape (32, 3, 0, 0), which is not (width"),
        ("{}/scalar.safetensors", "new", "patch_embed.proj.weight is of shape (), which is not (width, 3"),
        ("{}/grey.safetensors", "new", "patch_embed.proj.weight is of shape (32, 1, 8, 8), which is not (width, 3"),
        ("{}/no_bias.safetensors", "new", "patch_embed.proj.bias is of shape (0,), but patch_embed.proj.weight of (32"),
        ("{}/scalar_head.safetensors", "keep", "head.weight is of shape (), which is not (classes, width)"),
        ("{}/no_embedding.safetensors", "new", "is of shape (1, 10, 0), which is not (1, N, width)"),
        ("{}/damaged.safetensors", "new", "damaged.safetensors: "),
        ("{}/nothing.safetensors", "new", "no such file or directory"),
        ("{}/nothing", "new", "no such file or directory"),
        ("{}/empty", "new", "is no checkpoint, and there are none in it"),
    ],
)
def test_weights_that_cannot_be_read_are_one_line(source, head, said, wrong_files):
    shapes = {name: list(tensor.shape) for name, tensor in full_weights().items()}
    with pytest.raises(UserError) as raised:
        weights.read_fitted(weights.find(source.format(wrong_files)), head, shapes, MODEL)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("prefix", "others"),
    [("module.", {}), ("_orig_mod.", {}), ("module._orig_mod.model.backbone.", {"n_averaged": torch.tensor(3)})],
)
def test_what_wrappers_put_before_names_is_taken_off_in_a_line(prefix, others, tmp_path):
    expected, said = full_weights(), []
    save_file(
        {**others, **{f"{prefix}{name}": tensor for name, tensor in expected.items()}}, tmp_path / "a.safetensors"
    )
    assert_same(weights.read(weights.find(str(tmp_path / "a.safetensors")), said.append), expected)
    left = "; its 1 other tensors are left out" if others else ""
    assert said == [f"{tmp_path}/a.safetensors: {prefix} is taken off its names{left}"]


def as_deit3(weights):
    return {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): tensor for name, tensor in weights.items()}


def as_dinov2(weights):
    others = without(weights, "reg_token", "pos_embed", "cls_token")
    first = torch.ones_like(weights["cls_token"])  # the position of the class token
    positions = torch.cat([first, weights["pos_embed"]], dim=1)
    tokens = {"cls_token": weights["cls_token"] - first, "register_tokens": weights["reg_token"], "mask_token": first}
    return {**others, **tokens, "pos_embed": positions}


def as_clip(weights):
    others = without(weights, "cls_token", "pos_embed")
    names = "\n".join(others)
    for old, new in {
        "patch_embed.proj": "conv1",
        "blocks.": "transformer.resblocks.",
        "norm_pre": "ln_pre",
        "\nnorm.": "\nln_post.",
        ".norm": ".ln_",
        "qkv.": "in_proj_",
        "attn.proj": "attn.out_proj",
        "fc1": "c_fc",
        "fc2": "c_proj",
    }.items():
        names = names.replace(old, new)
    tokens = {"class_embedding": weights["cls_token"][0, 0], "positional_embedding": weights["pos_embed"][0]}
    named = {**dict(zip(names.split("\n"), others.values(), strict=True)), **tokens}
    return {**{f"visual.{name}": tensor for name, tensor in named.items()}, "token_embedding.weight": torch.zeros(1)}


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    ("model", "rename"),
    [
        ("deit3_small_patch16_224", as_deit3),
        ("vit_small_patch14_reg4_dinov2", as_dinov2),
        ("vit_base_patch16_clip_224", as_clip),
    ],
)
def test_the_names_of_published_files_are_converted_by_timm(model, rename, prefix, tmp_path):
    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=0)
    expected = timm.create_model(model, **sizes).state_dict()
    renamed = {f"{prefix}{name}": tensor.contiguous() for name, tensor in rename(expected).items()}
    assert renamed.keys() != expected.keys()
    save_file(renamed, tmp_path / "a.safetensors")
    read = weights.read(weights.find(str(tmp_path / "a.safetensors")), lambda line: None)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(read[name], tensor)


@pytest.mark.parametrize(
    ("source", "values", "said"),
    [
        (
            "vit_tiny_patch16_224",
            {"PATCH_SIZE": 16, "DEPTH": 12},
            "is of shape (192, 3, 16, 16), but this model's is (32, 3, 16, 1",
        ),
        ("vit_tiny_patch16_384", TINY, "has no blocks.10.attn.proj.bias, "),
        (
            "vit_tiny_patch16_224",
            {**TINY, "DEPTH": 11},
            "blocks.11.attn.qkv.bias, ... (12 in all), which this model lac",
        ),
        ("vit_tiny_patch16_224", {**TINY, **KEEP}, "one for 1000 classes, but finetune.head ="),
        ("{}/no_norm_bias.safetensors", {}, "has no norm.bias (1 in all), which this model needs"),
    ],
)
def test_weights_of_another_model_are_one_line_on_every_rank(source, values, said, wrong_files):
    def line():
        engine, run = build_engine()
        with pytest.raises(UserError) as raised:
            start_from(run, engine)
        return str(raised.value)

    lines = set(call(line, 2, **{"finetune.weights": source.format(wrong_files), **values}))
    (only,) = lines
    assert only.startswith("finetune.weights: ")
    assert said in only
    assert "\n" not in only


@pytest.mark.parametrize(("offline", "most"), [(False, 2), (True, 0)])
def test_weights_by_name_without_a_network_are_asked_for_once(offline, most, tmp_path, monkeypatch, capfd):
    """Not again and again with a warning each time; with HF_HUB_OFFLINE not at all."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    asked = []

    def getaddrinfo(*where, **options):
        asked.append(where)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    said = "offline mode is enabled" if offline else "Name or service not known"
    with pytest.raises(UserError, match=rf"cannot be fetched from .* \(.*{said}.*\); without a network"):
        weights.read(weights.find("vit_small_patch16_224"))
    assert len(asked) <= most, "of the name of the host, by one request"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("values", "flags", "said"),
    [
        ({"finetune.frozen_blocks": 2}, [], "finetune is given, but there are no weights to start from"),
        ({"finetune.linear_probe": True}, [], "but there are no weights to start from: set finetune.weights, --resume"),
        ({"finetune.weights": ""}, [], "finetune.weights = '', but it must be a string that is not empty"),
        ({"finetune.weights": "{}"}, ["--eval-only"], "but finetune.head = 'new' starts with one of zeros"),
    ],
)
def test_what_would_be_trained_or_evaluated_from_scratch_is_refused(values, flags, said, file, tmp_path):
    values = {key: value.format(file) if isinstance(value, str) else value for key, value in values.items()}
    assert said in training.refused(tmp_path, 1, *flags, **values)
    assert not (tmp_path / storage.FOLDER).exists()


# ---------------------------------------------------------------------------------------------------------------------
# What is trained
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_depth(tmp_path_factory):
    """Files with weights of models of 2 and of 4 blocks."""
    folder = tmp_path_factory.mktemp("depths")
    for depth in (2, 4):
        save_file(full_weights(DEPTH=depth), folder / f"{depth}.safetensors")
    return {depth: folder / f"{depth}.safetensors" for depth in (2, 4)}


def num_blocks(layout):
    """Of a model of which half can be frozen: one in each chunk of a pipeline."""
    return 4 if "PP" in layout else 2


def frozen(of_depth, depth, **values):
    """Overrides with which half of the blocks is not trained."""
    finetune = {"finetune.weights": str(of_depth[depth]), "finetune.frozen_blocks": depth // 2}
    return {"DEPTH": depth, **KEEP, **finetune, **values}


@pytest.fixture(scope="module")
def references(of_depth, small_sample, tmp_path_factory):
    """Runs of one process, by number of blocks and optimizer."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(small_sample))
        for depth, optimizer in ((2, "adamw"), (4, "adamw"), (2, "lamb"), (4, "lamb")):
            values, output = frozen(of_depth, depth, **OPTIMIZERS[optimizer]), tmp_path_factory.mktemp("reference")
            found[depth, optimizer] = training.train(output, steps=4, **values)
    return found


def saved(output, name=storage.MODEL):
    return load_file(storage.newest(output / storage.FOLDER)[0].path / name)


def assert_half_is_trained(output, start, depth):
    """What is frozen is as it was, to the bit, and has no moments; all else has changed, and has some."""
    names = {name for name in start if re.match(r"norm|head", name)}
    names |= {name for name in start for n in range(depth // 2, depth) if name.startswith(f"blocks.{n}.")}
    assert trained(saved(output), start) == names
    assert {name.partition(".")[2] for name in saved(output, storage.OPTIMIZER)} == names


LAMB = {"PP 2": "lamb", "2D 4": "lamb"}  # norms of whole parameters, of which some have no gradient


@pytest.mark.parametrize("layout", [*test_layouts.KINDS, "PP 2 interleaved × 2", "DP 2 × PP 2"])
def test_every_layout_has_the_curve_of_one_process(layout, of_depth, references, few_test_images, tmp_path):
    """From the same weights. Half of the blocks are frozen: of two pipeline stages the first has nothing to train."""
    world_size, values = LAYOUTS[layout]
    depth, optimizer = num_blocks(layout), LAMB.get(layout, "adamw")
    values = frozen(of_depth, depth, **OPTIMIZERS[optimizer], **values)
    run, expected = training.train(tmp_path, world_size, steps=4, **values), references[depth, optimizer]
    test_layouts.assert_same_curve(run.steps, expected.steps)
    assert run.evaluations[-1]["eval_loss"] == pytest.approx(expected.evaluations[-1]["eval_loss"], rel=1e-4)
    assert_half_is_trained(tmp_path, load_file(of_depth[depth]), depth)


@pytest.mark.parametrize("values", [{}, {"ema.decay": 0.5, "gradient_accumulation": 2, "BATCH_SIZE": 16}], ids=str)
def test_half_precision_in_a_pipeline_whose_first_stage_is_frozen(values, of_depth, few_test_images, tmp_path):
    """The frozen weights in checkpoints are those of the file, not rounded ones."""
    layout = {**LAYOUTS["DP 2 × PP 2"][1], **values, "fp16.dtype": "fp16"}
    training.train(tmp_path, 4, steps=3, amp="NAIVE", **frozen(of_depth, 4, **layout))
    assert_half_is_trained(tmp_path, load_file(of_depth[4]), 4)


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        ("DP 2", {}),
        ("PP 2", {}),
        ("PP 2", {"finetune.linear_probe": True}),
        ("PP 2 interleaved × 2", {"ema.decay": 0.9}),
    ],
)
def test_a_run_that_stopped_resumes_to_the_bit(layout, values, of_depth, few_test_images, tmp_path):
    """Even if the weights that it started from are gone."""
    world_size, parallel = LAYOUTS[layout]
    depth = num_blocks(layout)
    weights = shutil.copy(of_depth[depth], tmp_path / "start.safetensors")
    values = {**frozen(of_depth, depth), **parallel, **values, "finetune.weights": str(weights)}
    whole = training.train(tmp_path / "whole", world_size, steps=5, **values)
    training.train(tmp_path / "stopped", world_size, steps=2, **values)
    weights.unlink()
    stopped = training.train(tmp_path / "stopped", world_size, steps=5, **values)
    for name in (storage.MODEL, storage.OPTIMIZER):
        assert_same(saved(stopped.output, name), saved(whole.output, name))
    assert stopped.records == whole.records
    if "finetune.linear_probe" in values:
        assert trained(saved(whole.output), load_file(of_depth[depth])) == {"head.weight", "head.bias"}


def test_another_layout_resumes_what_is_frozen(of_depth, references, few_test_images, tmp_path):
    """From one process to a pipeline whose first stage has no moments, and back."""
    for steps, layout in ((1, "DP 2"), (2, "PP 2"), (4, "DP 2")):
        world_size, values = LAYOUTS[layout]
        training.train(tmp_path, world_size, steps=steps, **frozen(of_depth, 4, **values))
    test_layouts.assert_same_curve(read_metrics(tmp_path)[0], references[4, "adamw"].steps)
    assert_half_is_trained(tmp_path, load_file(of_depth[4]), 4)


def test_what_is_frozen_gets_no_moments_of_a_checkpoint(run):
    """It would keep them in memory, for nothing."""
    checkpoint, _ = storage.newest(run / storage.FOLDER)

    def names():
        engine, _ = build_engine()
        tensors.scatter_moments(engine, lambda: checkpoint.tensors(storage.OPTIMIZER), 1, {}, "")
        state = engine.optimizer.optim.state
        return {p.requires_grad for p in state}, len(state)

    assert call(names, **{"finetune.frozen_blocks": 4}) == [({True}, 4)]


@pytest.mark.parametrize("layout", [None, "PP 2", "ZeRO", "DP 4, zero 3"])
def test_blocks_trained_from_the_middle_on_resume_with_as_many_updates_as_they_had(layout, of_depth, tmp_path):
    """Adam corrects the bias of moments by their number of updates: by that of other parameters they would leap."""
    world_size, own = {None: (1, {}), "ZeRO": (2, {"zero.stage": 1})}.get(layout) or LAYOUTS[layout]
    values = {**frozen(of_depth, 4, **OPTIMIZERS["adamw"]), **own}

    def run(name, *steps):
        for at in steps:
            training.train(tmp_path / name, world_size, "--accept-changes", steps=at, **values)

    run("parts", 2)
    values["finetune.frozen_blocks"] = 0
    shutil.copytree(tmp_path / "parts", tmp_path / "whole")
    run("parts", 4, 6)
    run("whole", 6)
    assert training.records(tmp_path / "parts") == training.records(tmp_path / "whole")
    state = storage.newest(tmp_path / "parts" / storage.FOLDER)[0].state
    assert (state["moments_step"], set(state["fewer_updates"].values())) == (6, {4})


@pytest.mark.parametrize("layout", ["DP 2", "PP 2"])
def test_a_linear_probe_is_a_linear_layer_on_fixed_features(layout, file):
    world_size, values = LAYOUTS[layout]
    rate, num_steps = 0.5, 10

    def train():
        engine, run = build_engine()
        start_from(run, engine)
        engine.train()
        replica = gpc.get_local_rank(ParallelMode.DATA)
        batch = tuple(tensor.chunk(run.layout.data)[replica] for tensor in (IMAGES, LABELS))
        for _ in range(num_steps):
            engine.zero_grad()
            engine.execute_schedule(iter([batch]))
            engine.step()
        return {p.shard.name: p.detach() for p in engine.bare_model.parameters() if p.requires_grad}, engine.loss

    optimizer = dict(OPTIMIZER="sgd", MOMENTUM=0.0, LEARNING_RATE=rate, WEIGHT_DECAY=0.0, clip_grad_norm=0.0)
    values = {**values, "BATCH_SIZE": 4 if layout == "DP 2" else 8}
    values |= {"finetune.weights": str(file), "finetune.linear_probe": True}
    ranks = call(train, world_size, **optimizer, **values)

    reference = full_vit()
    reference.load_state_dict(load_file(file))
    with torch.no_grad():
        features = reference.forward_head(reference.forward_features(IMAGES), pre_logits=True)
    head = torch.nn.Linear(32, 10)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    sgd = torch.optim.SGD(head.parameters(), lr=rate)
    for _ in range(num_steps):
        sgd.zero_grad()
        loss = F.cross_entropy(head(features), LABELS)
        loss.backward()
        sgd.step()
    assert loss < 2.0
    found, last = ranks[-1]
    assert found.keys() == {"head.weight", "head.bias"}
    assert last == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, head.get_parameter(name.removeprefix("head.")), rtol=1e-4, atol=1e-6)


def test_more_frozen_blocks_than_the_model_has_are_one_line(tmp_path):
    line = training.refused(tmp_path / "run", 2, **{"finetune.frozen_blocks": 5})
    assert "finetune.frozen_blocks = 5, but the model has 4 blocks" in line


def test_which_parameters_a_block_count_freezes():
    def names():
        engine, _ = build_engine()
        return {p.shard.name for p in engine.bare_model.parameters() if not p.requires_grad}

    def frozen_by(**finetune):
        (found,) = call(names, POOL="avg", finetune=finetune)
        return {re.sub(r"(blocks\.\d).*|\..*", r"\1", name) for name in found}

    embedding = {"cls_token", "pos_embed", "patch_embed"}
    blocks = {f"blocks.{number}" for number in range(4)}
    assert frozen_by() == frozen_by(frozen_blocks=0) == set()
    assert frozen_by(frozen_blocks=2) == {*embedding, "blocks.0", "blocks.1"}
    assert frozen_by(frozen_blocks=4) == {*embedding, *blocks}
    assert frozen_by(linear_probe=True) == {*embedding, *blocks, "fc_norm"}


@pytest.mark.parametrize(
    ("name", "shared"),
    [("vit_base_patch16_clip_224", "norm_pre.weight"), ("vit_small_patch16_rope_mixed_224", "rope.freqs")],
)
def test_parameters_shared_by_all_blocks_are_frozen_with_the_first_ones(name, shared):
    """The norm before them, and the frequencies of rotary positions, of which one tensor has all."""
    model = timm.create_model(name, depth=2, embed_dim=64, num_heads=2)
    for key, parameter in model.named_parameters():
        parameter.shard = SimpleNamespace(name=key)
    config = Config({"DEPTH": 2, "finetune": Config({"frozen_blocks": 1, "linear_probe": False})})
    frozen = {parameter.shard.name for parameter in optimizers.frozen_parameters(config, model)}
    assert {shared, "blocks.0.norm1.weight"} <= frozen
    assert not frozen & {"blocks.1.norm1.weight", "norm.weight", "head.weight"}


def test_learned_positions_do_not_take_the_place_of_fixed_ones(tmp_path):
    """Weights with sines and cosines are taken, at any image size."""
    for positions in ("learned", "sincos2d"):
        values = {**MODEL, **TINY, "MODEL": "vit_tiny_patch16_224", "DEPTH": 1, "POSITIONS": positions}
        model = build_timm_vit(Config(configs.complete(values, schemas.schema(schemas.DP))))
        save_file(model.state_dict(), tmp_path / f"{positions}.safetensors")

    def fitted(positions, **values):
        path = tmp_path / f"{positions}.safetensors"
        found = weights.find(str(path))
        shapes = {name: list(tensor.shape) for name, tensor in load_file(path).items()}
        shapes["pos_embed"][1] = 1 + (values["IMG_SIZE"] // 16) ** 2
        return weights.read_fitted(found, "keep", shapes, {"NUM_CLASSES": 10, "POSITIONS": "sincos2d", **values})

    assert fitted("sincos2d", IMG_SIZE=32)["pos_embed"].shape == (1, 5, 192)
    assert fitted("sincos2d", IMG_SIZE=64)["pos_embed"].shape == (1, 17, 192)
    with pytest.raises(UserError, match="has learned positions, which POSITIONS = 'sincos2d' would not train"):
        fitted("learned", IMG_SIZE=32)


def test_a_rank_without_gradients_has_its_norm_on_its_device(monkeypatch):
    """Where a sum over the ranks takes it from; on the CPU, the GPUs' all-reduce fails."""
    accelerator = type("Accelerator", (), {"get_current_device": lambda self: torch.device("meta")})()
    monkeypatch.setattr(sharding, "get_accelerator", lambda: accelerator)
    assert sharding.global_norm([], []).device.type == "meta"


@pytest.mark.parametrize(("patched", "left"), [(False, 4), (True, 0)])
def test_3d_layers_keep_no_gradient_of_what_is_frozen(patched, left, monkeypatch):
    """Upstream's keep those of a frozen block behind one that is trained: those of 4 biases."""
    if not patched:
        monkeypatch.setattr("colossal_vit.engine.engine.drop_gradients_of_frozen", lambda: None)

    def step():
        engine, _ = build_engine()
        engine.train()
        for parameter in engine.bare_model.blocks["1"].parameters():
            parameter.requires_grad_(".attn." not in parameter.shard.name and ".mlp." not in parameter.shard.name)
        engine.execute_schedule(iter([(IMAGES, LABELS)]))
        return len(parallel_3d_utils._async_grad_bucket)

    assert call(step, 8, DEPTH=2, **LAYOUTS["3D 8"][1]) == [left] * 8


def test_a_dry_run_shows_that_less_memory_is_needed(tmp_path):
    """In the first of two stages, which has no gradients, no moments, and keeps no activations."""

    def parts(**values):
        said = training.train(tmp_path, 1, "--dry-run", **LAYOUTS["PP 2"][1], **values).said
        rows = re.findall(r"^stage \d +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
        return [[float(number) for number in row] for row in rows]

    (weights, *whole), last = parts()
    (same, *less), unchanged = parts(**{"finetune.frozen_blocks": 2})
    assert (weights, last) == (same, unchanged)
    assert less[:2] == [0.0, 0.0]
    assert less[2] < whole[2] / 2
    assert less[3] < whole[3] / 2
