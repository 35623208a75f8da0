"""What only a GPU can show. Without one these tests are a rehearsal: small, on the CPU, which proves that they work.

Every run on a GPU is a process of its own, as a user starts it; in a rehearsal, too, but that it need not import
everything. scripts/gpu_check.py says how many GPUs it has found: if these tests find another number, all of them fail.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.results import read_metrics
from safetensors.torch import load_file, save_file

import conftest
import fork_ranks
import imagenet_dali_dataloader
import launchers
import layouts
import training
import vit
import warm
from fork_ranks import ROOT

EXPECTED = os.environ.get("GPU_CHECK_GPUS")  # what gpu_check has found, 0 in a rehearsal
REHEARSAL = not int(EXPECTED or launchers.num_gpus())
MODEL = {"DROP_RATE": 0.1, "DROP_PATH_RATE": 0.1, **({"DEPTH": 2} if REHEARSAL else {})}
SIZE = dict(IMG_SIZE=16, PATCH_SIZE=8) if REHEARSAL else dict(IMG_SIZE=224, PATCH_SIZE=16)  # 197 tokens
RECIPE = {"bce.threshold": 0.2, "ema.decay": 0.9, "augment.policy": "three"}
RECIPE |= {"augment.color_jitter": 0.3, "augment.erase": 0.5}
MODES = [("TORCH", "fp16"), ("TORCH", "bf16"), ("NAIVE", "fp16"), ("NAIVE", "bf16"), ("APEX", "fp16")]
# Those that are compiled, too; test_compile.py compiles on the CPU.
COMPILED = [] if REHEARSAL else [(None, None, True), ("TORCH", "fp16", True), ("NAIVE", "bf16", True)]
SOME = [(None, None, False), ("TORCH", "fp16", False), ("NAIVE", "fp16", False), *COMPILED[1:]]
NUM_STEPS = 4 if REHEARSAL else 20
# Of what a user's environment has, `launchers.environment` drops PYTHONPATH; it may be where Colossal-AI is.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def on_cpu(script, flags):
    """Run a train script on the CPU."""
    result = fork_ranks.run(script, flags)
    assert result.codes == [0], str(result)


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """The environment variables of runs on GPUs; in a rehearsal, with programs that start at once."""
    assert EXPECTED in (None, str(launchers.num_gpus())), f"gpu_check.py has found {EXPECTED} GPUs, torch finds others"
    variables = {"PYTHONPATH": PYTHONPATH}
    with contextlib.ExitStack() as stack:
        if REHEARSAL:
            warmed = stack.enter_context(warm.Warm(tmp_path_factory.mktemp("warm")))
            path = launchers.environment()["PATH"]
            variables |= {**warmed.environment, "PATH": f"{warmed.bin}:{path}", "CUDA_VISIBLE_DEVICES": ""}
        yield variables


@pytest.fixture(scope="module")
def on_gpu(programs):
    """Run a train script in new processes, on GPUs unless this is a rehearsal; returns what it printed."""

    def run(script, flags, ranks=1, **variables):
        program = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else ["python"]
        path = ROOT / script
        command = [*program, path.name, *flags]
        code, said = launchers.run(command, cwd=path.parent, gpus=True, **programs, **variables)
        assert code == 0, said
        where = f"({'cpu' if REHEARSAL else 'cuda:0'}, {'gloo' if REHEARSAL or 'gloo' in flags else 'nccl'})"
        assert where in said or "--dry-run" in flags, said
        return said

    return run


def flags(output, steps=NUM_STEPS, amp=None, dtype=None, **values):
    """The command line of a small run of train_hybrid.py, or of another `script`."""
    if dtype:
        values = {"fp16.dtype": dtype, **({"IMG_SIZE": 16} if REHEARSAL else {}), **values}  # which a CPU is slow in
    return [*training.flags(amp, **{**MODEL, **values}), "--output", str(output), "--max-steps", str(steps)]


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Config values to start from random weights, by size of the images. In a file, which new processes can read."""

    @functools.cache
    def values(img_size):
        config = training.config_of(training.flags(**MODEL, IMG_SIZE=img_size))
        with pytest.MonkeyPatch.context() as patch:
            conftest.random_start(patch)
            # Halves: at the first loss scale, a gradient of the whole ones overflows in fp16.
            weights = {name: weight / 2 for name, weight in vit.full_vit(config).state_dict().items()}
        path = tmp_path_factory.mktemp("weights") / "random.safetensors"
        save_file(weights, path)
        return {"finetune.weights": str(path), "finetune.head": "keep"}

    return values


@pytest.fixture(scope="module")
def fp32(start, tmp_path_factory):
    """Steps of the CPU in fp32, by size of the images."""

    @functools.cache
    def steps(img_size):
        output = tmp_path_factory.mktemp("cpu")
        on_cpu(training.HYBRID, flags(output, IMG_SIZE=img_size, **start(img_size)))
        return read_metrics(output)[0]

    return steps


@pytest.mark.parametrize(
    ("amp", "dtype", "compiled"), [(None, None, False), *((*mode, False) for mode in MODES), *COMPILED]
)
def test_losses_are_those_of_the_cpu(amp, dtype, compiled, fp32, start, on_gpu, tmp_path):
    """In fp32 to the tolerances of the layouts, in half precision to 2 %."""
    img_size = 16 if dtype and REHEARSAL else layouts.MODEL["IMG_SIZE"]
    values = {"fp16.half_residual": True} if (amp, dtype) == ("TORCH", "fp16") and compiled else {}
    said = on_gpu(training.HYBRID, flags(tmp_path, amp=amp, dtype=dtype, COMPILE=compiled, **start(img_size), **values))
    steps, _ = read_metrics(tmp_path)
    expected = fp32(img_size)
    assert len(steps) == len(expected) == NUM_STEPS
    for here, there in zip(steps, expected, strict=True):
        tolerance = 0.02 if amp else 1e-5 if here["step"] == 1 else 1e-4
        assert here["loss"] == pytest.approx(there["loss"], rel=tolerance), here["step"]
    if amp:
        assert f"AMP_TYPE.{amp} " in said
        assert {"fp16": "float16", "bf16": "bfloat16"}[dtype] in said
        assert [r["loss"] for r in steps] != [r["loss"] for r in expected], "the mode must be in effect"


def test_dropout_is_that_of_the_cpu():
    """Dropout's masks to the bit, signs of zeros and what becomes of infinite values too; GELU is rounded otherwise.

    Without a GPU, Triton interprets the kernels.
    """
    variables = {"PYTHONPATH": PYTHONPATH, **({"TRITON_INTERPRET": "1"} if REHEARSAL else {})}
    command = [sys.executable, "-W", "ignore", "kernels_alike.py", "cpu" if REHEARSAL else "cuda"]
    code, said = launchers.run(command, cwd=ROOT / "tests", gpus=True, **variables)
    assert (code, said) == (0, "the same\n")


@pytest.mark.parametrize(
    ("script", "values"),
    [(training.CALTECH101, {}), (training.IMAGENET, {"SYNTHETIC": True, "gradient_accumulation": 2})],
)
def test_losses_of_the_other_examples(script, values, on_gpu, tmp_path):
    """Their data go to the device in other ways, with augmentation and Mixup there; dropout is drawn by other code."""

    def losses(run, output):
        run(script, flags(output, 3, script=script, DROP_RATE=0.1, BATCH_SIZE=16, **values))
        return [record["loss"] for record in read_metrics(output)[0]]

    assert losses(on_gpu, tmp_path / "gpu") == pytest.approx(losses(on_cpu, tmp_path / "cpu"), rel=1e-4)


@pytest.mark.parametrize("values", [{}, {"zero.stage": 1}], ids=["all of it", "zero"])
def test_ranks_that_share_a_gpu_train_as_one_process(values, fp32, start, on_gpu, tmp_path):
    """Over gloo: hooks, buckets, broadcasts and late reading on a GPU's streams, also where there is only one."""
    values = {**start(layouts.MODEL["IMG_SIZE"]), **values, "BATCH_SIZE": layouts.MODEL["BATCH_SIZE"] // 2}
    on_gpu(training.HYBRID, [*flags(tmp_path, **values), "--backend", "gloo"], 2)
    losses, expected = (
        [r["loss"] for r in steps] for steps in (read_metrics(tmp_path)[0], fp32(layouts.MODEL["IMG_SIZE"]))
    )
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(not (ROOT / "tools").exists(), reason="without tools/")
def test_layouts_agree_tensor_by_tensor(programs, start):
    """In float64, each rank a fork on a GPU of its own; also two micro-steps on one, where there is no other."""
    values = {**MODEL, **start(layouts.MODEL["IMG_SIZE"])}
    command = ["python", "-m", "tools.parity", training.HYBRID, *training.flags(**values), "accumulation 2", "DP 2"]
    code, said = launchers.run(command, cwd=ROOT, gpus=True, **programs)
    assert code == 0, said
    alone, replicas = said.splitlines()
    agrees = r": all \d+ tensors of 3 steps agree to "
    assert re.match(f"accumulation 2{agrees}", alone)
    if REHEARSAL or launchers.num_gpus() > 1:
        assert re.match(f"DP 2{agrees}", replicas)
    else:
        assert replicas.startswith("DP 2: not tried: rank 1 would be process 2 on this machine, which has 1 GPU(s)")


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("amp", "dtype", "compiled"), SOME)
def test_resumes_to_the_bit(amp, dtype, compiled, on_gpu, tmp_path):
    """With dropout, augmentation, EMA, and a loss scale that changes."""
    values = {**SIZE, **RECIPE, **training.MIXED[training.HYBRID], "COMPILE": compiled}
    values |= {"cudnn_deterministic": True, "checkpoint.keep": 2}
    if dtype == "fp16":
        values |= {"fp16.growth_interval": 2, "fp16.initial_scale": 2.0**22}
    if amp == "TORCH":
        values |= {"fp16.half_residual": True}

    def run(name, steps):
        command = flags(tmp_path / name, steps, amp, dtype, **values)
        on_gpu(training.HYBRID, command, CUBLAS_WORKSPACE_CONFIG=":4096:8")
        return training.records(tmp_path / name)

    def tensors(name):
        newest, _ = storage.newest(tmp_path / name / storage.FOLDER)
        files = [newest.path / file for file in (storage.MODEL, storage.OPTIMIZER, storage.EMA)]
        return {f"{file.stem} {key}": tensor for file in files for key, tensor in load_file(file).items()}

    for steps in (2, 3):
        run("parts", steps)
    parts, whole = run("parts", 6), run("whole", 6)
    found, expected = tensors("parts"), tensors("whole")
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert parts == whole


@pytest.mark.parametrize("amp", [None, "TORCH", "NAIVE"])
def test_memory_is_what_a_dry_run_says(amp, on_gpu, tmp_path):
    """Within 10 % of what CUDA has allocated, for a model of 21 M parameters."""
    values = dict(HIDDEN_SIZE=384, NUM_HEADS=6, DEPTH=12, PATCH_SIZE=4, BATCH_SIZE=256)
    if REHEARSAL:
        values = dict(DEPTH=1, IMG_SIZE=16)
    command = flags(tmp_path, 3, amp, **values)
    on_gpu(training.HYBRID, command)
    allocated = read_metrics(tmp_path)[0][-1]["memory_gb"] * 1e9
    said = on_gpu(training.HYBRID, [*command, "--dry-run"])
    peak = float(re.search(r"^stage 0 .* ([\d,.]+)$", said, re.MULTILINE)[1].replace(",", "")) * 1e6
    if not REHEARSAL:  # there it is the memory of the whole process
        assert peak == pytest.approx(allocated, rel=0.1)


@pytest.mark.parametrize(("amp", "dtype", "compiled"), SOME)
def test_no_step_waits_for_the_device(amp, dtype, compiled, on_gpu, tmp_path):
    said = on_gpu(training.HYBRID, [*flags(tmp_path, 4, amp, dtype, COMPILE=compiled), "--profile"])
    assert REHEARSAL or "in a step the host waits for the device: 0\n" in said
    idle = re.findall(r"in the traced step the device runs no kernel for ([\d.]+) of ([\d.]+) ms\n", said)
    assert REHEARSAL or (len(idle) == 1 and 0 < float(idle[0][0]) < float(idle[0][1]))


# ---------------------------------------------------------------------------------------------------------------------
# DALI
# ---------------------------------------------------------------------------------------------------------------------

DECODE = """
import sys, torch
from pathlib import Path
import imagenet_dali_dataloader as loaders
import train
data, kind, gpu_aug, path = sys.argv[1:]
device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
records = loaders.find_records(Path(data), "validation")
values = ["BATCH_SIZE=64", "SEED=1", "NUM_CLASSES=10", f"dali.gpu_aug={gpu_aug}"]
config = train.SCRIPT.load("config_sample.py", values)
images, labels = next(iter(loaders.DaliLoader(records, False, config, device)))
assert images.device.type == labels.device.type == kind
torch.save([images.float().cpu(), labels.cpu()], path)
"""


@pytest.fixture(scope="module")
def packed(programs, tmp_path_factory):
    """The digits as TFRecords."""
    pytest.importorskip("nvidia.dali")
    root = tmp_path_factory.mktemp("packed")
    command = [
        "python",
        "build_tfrecords.py",
        str(imagenet_dali_dataloader.write_imagenet(root)),
        str(root / "tfrecords"),
    ]
    code, said = launchers.run(command, cwd=ROOT / "vit_imagenet_dali", **programs)
    assert code == 0, said
    return root / "tfrecords"


@pytest.mark.parametrize("gpu_aug", [True, False])
def test_dali_decodes_as_on_the_cpu(gpu_aug, packed, programs, tmp_path):
    """nvJPEG and libjpeg round differently, in few bits; decoded on the CPU, images are the same but for rounding."""
    decoded = []
    for number, kind in enumerate(("cpu", "cpu" if REHEARSAL else "cuda")):
        command = ["python", "-c", DECODE, str(packed), kind, str(gpu_aug), str(tmp_path / f"{number}.pt")]
        code, said = launchers.run(command, cwd=ROOT / "vit_imagenet_dali", gpus=kind == "cuda", **programs)
        assert code == 0, said
        decoded.append(torch.load(tmp_path / f"{number}.pt"))
    (images, labels), (others, same) = decoded
    assert labels.tolist() == same.tolist()
    apart = (images - others).abs()
    assert (apart.mean() if gpu_aug else apart.max()).item() < (0.02 if gpu_aug else 1e-6)  # a pixel's deviation is 1


EPOCHS = """
import sys, torch
from pathlib import Path
import imagenet_dali_dataloader as loaders
import train
from buffers import Dropped, Overwritten

data, kind, gpu_aug = sys.argv[1:]
device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
records = loaders.find_records(Path(data), "train")
values = ["BATCH_SIZE=64", "SEED=1", "NUM_CLASSES=10", "gradient_accumulation=1", "NUM_EPOCHS=1", "WARMUP_EPOCHS=0"]
values += [f"dali.gpu_aug={gpu_aug}"]
config = train.SCRIPT.load("config_sample.py", values)

def epoch(buffers):
    batches, images = loaders.DaliLoader(records, True, config, device), []
    batches.unused = buffers
    for batch, _ in batches:
        if kind == "cuda":
            torch.cuda._sleep(50_000_000)  # 30 ms in which the GPU does nothing else in this stream
        images.append(batch.clone())
    return torch.cat(images).cpu()

first, second, used = epoch(Dropped()), epoch(Dropped()), Overwritten()
assert torch.equal(first, second), "decoded otherwise each time"
assert torch.equal(first, epoch(used)), "read after it was overwritten"
assert 0 < len(used) < len(first) / 64
"""


@pytest.mark.parametrize("gpu_aug", [True, False])
def test_dali_reads_no_buffer_after_its_images_are_there(gpu_aug, packed, programs):
    """An epoch is the same to the bit whether buffers are overwritten at once or never used again."""
    command = ["python", "-c", EPOCHS, str(packed), "cpu" if REHEARSAL else "cuda", str(gpu_aug)]
    variables = {**programs, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{PYTHONPATH}"}
    code, said = launchers.run(command, cwd=ROOT / "vit_imagenet_dali", gpus=True, **variables)
    assert code == 0, said


EVERYTHING = {**training.MIX, **RECIPE}
TRAINED = {"published": {"dali.gpu_aug": True}, "all of it": {**EVERYTHING, "dali.gpu_aug": True}}
TRAINED |= {} if REHEARSAL else {"all of it, decoded on the CPU": {**EVERYTHING, "dali.gpu_aug": False}}


@pytest.mark.parametrize("recipe", TRAINED.values(), ids=TRAINED)
def test_dali_trains_and_resumes(recipe, packed, on_gpu, tmp_path):
    """Mixup and evaluation included; the stream of images resumes where it stopped."""
    values = dict(BATCH_SIZE=16, gradient_accumulation=2, DATA=str(packed), **recipe)

    def run(name, steps):
        on_gpu(training.IMAGENET, flags(tmp_path / name, steps, script=training.IMAGENET, **values))
        return read_metrics(tmp_path / name)

    run("parts", 2)
    (steps, evaluations), (expected, _) = run("parts", 4), run("whole", 4)
    assert evaluations[-1]["eval_images"] == 360
    assert [r["loss"] for r in steps] == pytest.approx([r["loss"] for r in expected], rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Several GPUs
# ---------------------------------------------------------------------------------------------------------------------


def test_reduction_overlaps_the_backward_pass(on_gpu, tmp_path):
    """In a traced step of two replicas, NCCL's kernels run beside others for a good part of their time."""
    if not REHEARSAL and launchers.num_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    values = {"BATCH_SIZE": 16, "torch_ddp.bucket_cap_mb": 0.01}
    if not REHEARSAL:
        values = dict(SIZE, HIDDEN_SIZE=768, NUM_HEADS=12, DEPTH=12, BATCH_SIZE=32)
    on_gpu(training.HYBRID, [*flags(tmp_path, 3, **values), "--profile"], 2)
    events = json.loads((tmp_path / "profile-rank0.json").read_text())["traceEvents"]
    reductions, others = [], []
    for event in events:
        if event.get("cat") == "kernel":
            (reductions if "nccl" in event["name"].lower() else others).append(event)
        elif REHEARSAL and event["name"] == "gloo:all_reduce":
            reductions.append(event)
        elif REHEARSAL and event["name"] == "backward":
            others.append(event)
    beside = sum(
        max(0.0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]))
        for a in reductions
        for b in others
    )
    share = beside / sum(event["dur"] for event in reductions)
    print(f"{share:.0%} of the reductions' time is beside other kernels")
    assert share > (0.0 if REHEARSAL else 0.25)


def ranks_of(output):
    """Process numbers of the ranks that write to a folder, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            variables = dict(v.partition("=")[::2] for v in (process / "environ").read_text().split("\0"))
        except (OSError, UnicodeDecodeError):
            continue
        if str(output).encode() in command and "RANK" in variables and b"torch.distributed.run" not in command:
            found[int(variables["RANK"])] = int(process.name)
    return found


def test_ranks_end_when_one_hangs(tmp_path):
    """On CUDA the others wait in a kernel of NCCL, which only its watchdog can end."""
    if not REHEARSAL and launchers.num_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_hybrid.py"]
    command += [*flags(tmp_path / "run", 10_000, BATCH_SIZE=16, NUM_EPOCHS=10_000), "--timeout", "10"]
    said = tmp_path / "log.txt"
    environment = launchers.environment(gpus=True, PYTHONPATH=PYTHONPATH)
    with said.open("w") as file:
        job = subprocess.Popen(command, cwd=ROOT / "vit_cifar10_hybrid", env=environment, stdout=file, stderr=file)
    try:
        launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") >= 3, said.read_text)
        hanging = ranks_of(tmp_path / "run")[1]
        os.kill(hanging, signal.SIGSTOP)
        stopped = launchers.steps_on_record(tmp_path / "run")
        time.sleep(1)
        assert launchers.steps_on_record(tmp_path / "run") <= stopped + 1
        assert job.wait(fork_ranks.PATIENCE) != 0
    finally:
        job.kill()
