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
from torch import Tensor
from torchvision.transforms import v2

BLUR = dict(kernel_size=13, sigma=(0.1, 2.0))  # pixels; the kernel holds three times the largest sigma each way
SMALLEST_BLURRED = BLUR["kernel_size"] // 2 + 1  # pixels: half a kernel is reflected at the edges
SOLARIZED = 128  # values from here on are inverted
CROP_ASPECT = (3 / 4, 4 / 3)  # width ÷ height of random crops, as in "Going deeper with convolutions", arXiv:1409.4842


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
    """Augments images, each with random numbers of its own.

    The random numbers depend on the seed, the epoch and the number of the image only, so that they are the same in
    every layout and in a run that resumes. The random numbers of the training are left as they are.

    Args:
        config: of the run; its block `augment` says how.

    Attributes:
        transforms: of uint8 images, in their order.
        erasing: of normalised images, or None.
    """

    def __init__(self, config: Config):
        self.seed, how = config.SEED, config.augment or {}
        self.transforms: list[v2.Transform] = []
        if how.get("policy") == "rand":
            self.transforms.append(v2.RandAugment(how["n"], how["m"]))
        if how.get("policy") == "three":
            three = v2.RandomGrayscale(p=1.0), v2.RandomSolarize(SOLARIZED, p=1.0), v2.GaussianBlur(**BLUR)
            self.transforms.append(v2.RandomChoice(three))
        if strength := how.get("color_jitter"):
            self.transforms.append(v2.ColorJitter(strength, strength, strength))
        self.erasing = v2.RandomErasing(how["erase"], value="random") if how.get("erase") else None

    @property
    def does_anything(self) -> bool:
        """Whether images are changed at all."""
        return bool(self.transforms or self.erasing)

    def __call__(self, images: Tensor, numbers: Tensor, epoch: int, mean: Tensor, std: Tensor) -> Tensor:
        """Augment, and normalise.

        Args:
            images: (B, 3, H, W), with values from 0 to 255.
            numbers: (B,), of the images in the epoch, on the host.
            epoch: from 0 on.
            mean, std: of each channel, (3, 1, 1).

        Returns:
            Of the type of `mean` and the shape of `images`.
        """
        if images.is_floating_point():
            images = images.round().to(torch.uint8)
        augmented = torch.empty(images.shape, dtype=mean.dtype, device=images.device)
        with cpu_seed(self.seed), _one_thread():
            for image, result, number in zip(images, augmented, numbers.tolist(), strict=True):
                seed = np.random.SeedSequence((self.seed, epoch, number)).generate_state(1, np.uint64)
                torch.default_generator.manual_seed(int(seed[0]))  # torch.manual_seed would seed GPUs, too
                for transform in self.transforms:
                    image = transform(image)
                result.copy_(image).sub_(mean).div_(std)
                if self.erasing:
                    result.copy_(self.erasing(result))
        return augmented
