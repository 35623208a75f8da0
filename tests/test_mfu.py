"""What a model computes, and of what share a device's peak that is."""

from types import SimpleNamespace

import timm
import torch
from colossal_vit.model.mfu import peak_flops, training_flops
from colossal_vit.model.timm_vit import skip_unused_tokens
from torch.utils.flop_counter import FlopCounterMode

import fork_ranks
import myhooks


def test_flops_of_vit_b16_are_those_worked_out_by_hand():
    """Counted by hand: 197 tokens, 12 blocks of 12·D² multiplications a token and 2·N·D for attention."""
    num_tokens, hidden, patches = 197, 768, 196
    block = num_tokens * 12 * hidden**2 + 2 * num_tokens**2 * hidden
    multiplications = 12 * block + patches * 3 * 16**2 * hidden + hidden * 1000
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    assert training_flops(model, 224) == 3 * 2 * multiplications
    skip_unused_tokens(model)
    assert training_flops(model, 224) == 3 * 2 * multiplications


def test_blocks_of_a_hybrids_embedding_are_not_the_models():
    with torch.device("meta"):
        model = timm.create_model("vit_small_r26_s32_224", img_size=64, depth=2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 64, 64, device="meta"))
    whole = 3 * counter.get_total_flops()
    assert training_flops(model, 64) == whole
    skip_unused_tokens(model)
    assert training_flops(model, 64) == whole


def test_counting_leaves_the_model_alone():
    model = timm.create_model("test_vit", depth=1)  # with no other block beside the last
    before = {name: (tensor.data_ptr(), tensor.device) for name, tensor in model.state_dict().items()}
    assert training_flops(model, 160) > 0
    assert before == {name: (tensor.data_ptr(), tensor.device) for name, tensor in model.state_dict().items()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_epoch_over_several_processes_is_a_share_of_all_their_peaks(monkeypatch):
    """By hand: 2 processes make 500 images/s together, of 1.2 TFLOP each, on GPUs that could make 1000 TFLOP/s each."""
    config = dict(IMG_SIZE=160, TF32=True, fp16=None)
    records = [
        dict(images_per_s=rate, data_s=0.25, step_s=1.0, memory_gb=number)
        for number, rate in enumerate([100.0, 500.0, 700.0])
    ]
    asked = []
    monkeypatch.setattr(myhooks, "peak_of", lambda device, *how: asked.append(how) or 1e15)
    monkeypatch.setattr(myhooks, "training_flops", lambda model, size: 7.5e9 * size)

    def function():
        said = []
        hook = myhooks.ThroughputHook(
            None, torch.device("cpu"), SimpleNamespace(info=lambda text, ranks: said.append(text))
        )
        engine = SimpleNamespace(schedule=SimpleNamespace(batch_size=8), accumulation=4)
        hook.after_train_epoch(SimpleNamespace(engine=engine, states={"records": records}, cur_epoch=3, num_epochs=9))
        return said, asked

    for said, how in fork_ranks.call(function, 2, **config):
        rates = "500 images/s (250 a process), MFU 30.0%"
        assert said == [f"epoch 3 of 9: total batch 64, {rates}, peak memory 2.0 GB, waited for data 25.0%"]
        assert how == [(torch.float32, True)]


def test_peak_flops_of_a_gpu_are_found_by_its_exact_name():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16) is None
    assert peak_flops("NVIDIA H100 PCIe", torch.float16) == 756e12
    assert peak_flops("NVIDIA H100 NVL", torch.float16) == 835e12
    assert peak_flops("NVIDIA A10", torch.float16) == 125e12
    assert peak_flops("Tesla V100-SXM2-16GB", torch.float16) == 125e12
    for other in ("NVIDIA A10G", "NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090 D"):
        assert peak_flops(other, torch.float16) is None, "a name that only begins or ends like one in the table"
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU", torch.float16) is None
    assert peak_flops("NVIDIA GeForce RTX 4090", torch.bfloat16) == 165.2e12
    assert peak_flops("NVIDIA GeForce RTX 5090", torch.float32, tf32=True) == 104.8e12
    assert peak_flops("NVIDIA GeForce RTX 3090", torch.float16) == 71e12
    assert peak_flops("NVIDIA GeForce RTX 3090 Ti", torch.float16) is None
    assert peak_flops("NVIDIA L4", torch.bfloat16) == 121e12
    assert peak_flops("Tesla T4", torch.float16) == 65e12
    assert peak_flops("NVIDIA GH200 480GB", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA B200", torch.bfloat16) == 2250e12
    assert peak_flops("NVIDIA L40", torch.bfloat16) == 181e12
    assert peak_flops("NVIDIA L40S", torch.bfloat16) == 362e12
    assert peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H200 NVL", torch.bfloat16) == 835e12
    assert peak_flops("NVIDIA GB200", torch.bfloat16) is None
    assert peak_flops("", torch.float32) is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156e12
