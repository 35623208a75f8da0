"""Augmentation of training images by torchvision's transforms, the same in every layout.

RandAugment is E. D. Cubuk et al., arXiv:1909.13719; 3-Augment is H. Touvron et al., "DeiT III", arXiv:2204.07118:
grayscale, solarisation or blur, and a colour jitter; random erasing is Z. Zhong et al., arXiv:1708.04896.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from colossal_vit.rng.torch_generator import cpu_seed
from colossalai.context import Config
from torch import Tensor, nn
from torchvision.transforms import v2

BLUR = dict(kernel_size=13, sigma=(0.1, 2.0))  # pixels; the kernel holds three times the largest sigma each way


def build_policy(policy: str | None = None, n: int = 2, m: int = 9, color_jitter: float = 0.0) -> nn.Module:
    """What is done to an image (3, H, W) of type uint8; the values are those of the block `augment`."""
    parts: list[nn.Module] = []
    if policy == "rand":
        parts.append(v2.RandAugment(n, m))
    if policy == "three":
        blur = v2.GaussianBlur(**BLUR)
        parts.append(v2.RandomChoice([v2.RandomGrayscale(p=1.0), v2.RandomSolarize(128, p=1.0), blur]))
    if color_jitter:
        parts.append(v2.ColorJitter(*[color_jitter] * 3))
    return nn.Sequential(*parts)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch use one CPU thread: more of them wait for each other longer than a small image takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Augment:
    """Augments images one by one, each with random numbers of its own.

    They depend on the seed, the epoch and the number of the image only, so that they are the same in every layout and
    in a run that resumes. The random numbers of the training are left as they are.

    Args:
        config: of the run; its block `augment` says how.
    """

    def __init__(self, config: Config):
        how = dict(config.augment or {})
        self.seed, erase = config.SEED, how.pop("erase", 0.0)
        self.policy = build_policy(**how)
        self.erasing = v2.RandomErasing(erase, value="random") if erase else None

    @property
    def does_anything(self) -> bool:
        """Whether images are changed at all."""
        return len(self.policy) > 0 or self.erasing is not None

    def __call__(self, images: Tensor, numbers: Tensor, epoch: int, mean: Tensor, std: Tensor) -> Tensor:
        """Augment, and normalise.

        Args:
            images: (B, 3, H, W), with values from 0 to 255.
            numbers: (B,), of the images in the epoch, on the host.
            epoch: from 0 on.
            mean, std: of each channel, (3, 1, 1).

        Returns:
            float32, of the shape of `images`.
        """
        done = []
        images = images.round().to(torch.uint8) if images.is_floating_point() else images
        with cpu_seed(self.seed), _one_thread():
            for image, number in zip(images, numbers.tolist(), strict=True):
                seed = np.random.SeedSequence((self.seed, epoch, number)).generate_state(1, np.uint64)
                torch.default_generator.manual_seed(int(seed[0]))  # torch.manual_seed would seed GPUs, too
                image = (self.policy(image).float() - mean) / std
                done.append(self.erasing(image) if self.erasing else image)
        return torch.stack(done)
