"""The config block `machine`, for `--plan`."""

from colossal_vit.config.rules import POSITIVE, POSITIVE_INT, SHARE_ABOVE_0
from colossal_vit.config.settings import Block, Setting

MACHINE = Block(
    "what `--plan` is told of a machine: changes to one of its table, or all of another one",
    {
        "half_tflops": Setting(POSITIVE, "peak of dense matrix products in fp16 and bf16, TFLOP/s"),
        "single_tflops": Setting(POSITIVE, "the same in fp32, or in TF32 if the config says so"),
        "matmul_share": Setting(SHARE_ABOVE_0, "share of the peak that large matrix products reach"),
        "memory_gb": Setting(POSITIVE, "of a GPU, in units of 10⁹ bytes"),
        "memory_gb_s": Setting(POSITIVE, "bandwidth of that memory, GB/s"),
        "gpus_per_node": Setting(POSITIVE_INT, "GPUs that NVLink connects"),
        "link_gb_s": Setting(POSITIVE, "NVLink of a GPU in one direction, GB/s"),
        "network_gb_s": Setting(POSITIVE, "network between nodes, for each GPU and direction, GB/s"),
    },
)
