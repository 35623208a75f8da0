"""Augmentation of training images by torchvision's transforms, the same in every layout.

RandAugment is E. D. Cubuk et al., arXiv:1909.13719; 3-Augment is H. Touvron et al., "DeiT III", arXiv:2204.07118:
grayscale, solarisation or blur, and a colour jitter; random erasing is Z. Zhong et al., arXiv:1708.04896.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from colossal_vit.data.devices import to_device
from colossal_vit.rng.torch_generator import cpu_seed
from colossalai.context import Config
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import rgb_to_grayscale, solarize

BLUR = dict(kernel_size=13, sigma=(0.1, 2.0))  # pixels; the kernel holds three times the largest sigma each way
SMALLEST_BLURRED = BLUR["kernel_size"] // 2 + 1  # pixels: half a kernel is reflected at the edges
SOLARIZED = 128  # values from here on are inverted
CROP_ASPECT = (3 / 4, 4 / 3)  # width ÷ height of random crops, as in "Going deeper with convolutions", arXiv:1409.4842
PIXELS_ON_CPU = 2**16  # of the images that one operation takes at a time there, so that its results stay in the cache
RAND_AUGMENT = v2.RandAugment()

# ---------------------------------------------------------------------------------------------------------------------
# Drawn
# ---------------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """An operation on an image.

    Attributes:
        name: of the operation, see `_apply`.
        magnitude: that of RandAugment, the same for all images.
        strength: of other operations a factor, or a standard deviation in pixels; each image has its own.
    """

    name: str
    magnitude: float = 0.0
    strength: float = 0.0


class Erased(NamedTuple):
    """Rectangles of a batch that noise replaces.

    Attributes:
        images: (E,), places in the batch.
        rectangles: (E, 4), top, left, height and width in pixels.
        noise: float32, normally distributed, of all rectangles one after the other, each (3, height, width).
    """

    images: np.ndarray
    rectangles: np.ndarray
    noise: np.ndarray


class _Draws:
    """What torchvision's transforms would do to an image: they are called, but only note it.

    Args:
        policy, n, m, color_jitter, erase: as in the block `augment`.

    Attributes:
        transforms: in their order.
        steps: those of the last image but erasing.
        erased: top, left, height and width in pixels, and the noise (3, height, width), if the last image is erased.
    """

    def __init__(
        self, policy: str | None = None, n: int = 2, m: int = 9, color_jitter: float = 0.0, erase: float = 0.0
    ):
        self.transforms: list[v2.Transform] = []
        if policy == "rand":
            self.transforms.append(v2.RandAugment(n, m))
            self.transforms[0]._apply_image_or_video_transform = self._note_rand_augment
        if policy == "three":
            three = v2.RandomGrayscale(p=1.0), v2.RandomSolarize(SOLARIZED, p=1.0), v2.GaussianBlur(**BLUR)
            self.transforms.append(v2.RandomChoice([self._noting(transform) for transform in three]))
        if color_jitter:
            self.transforms.append(self._noting(v2.ColorJitter(*[color_jitter] * 3)))
        if erase:
            self.transforms.append(self._noting(v2.RandomErasing(erase, value="random")))

    def _note_rand_augment(self, image: Tensor, name: str, magnitude: float, **_: Any) -> Tensor:
        self.steps.append(Step(name, magnitude))
        return image

    def _noting(self, transform: v2.Transform) -> v2.Transform:
        def note(image: Tensor, params: dict[str, Any]) -> Tensor:
            if isinstance(transform, v2.RandomErasing):
                self.erased = [params[key] for key in "ijhwv"] if params["v"] is not None else None
            elif isinstance(transform, v2.ColorJitter):
                names = (("brightness", "contrast", "saturation", None)[number] for number in params["fn_idx"])
                self.steps += [Step(name, strength=params[f"{name}_factor"]) for name in names if name]
            else:
                self.steps.append(Step(type(transform).__name__, strength=params.get("sigma", [0.0])[0]))
            return image

        transform.transform = note
        return transform

    def draw(self, image: Tensor) -> None:
        """Draw from PyTorch's generator for an image of this size."""
        self.steps, self.erased = [], None
        for transform in self.transforms:
            transform(image)


# ---------------------------------------------------------------------------------------------------------------------
# Done
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch use one CPU thread: more of them wait for each other longer than a small image takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _blend(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """A share of the images (B, 3, H, W) and the rest of others; share: (B, 1, 1, 1)."""
    return torch.addcmul(images.mul(share), others, 1 - share).clamp_(0, 255).to(torch.uint8)


def _blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Each image (B, 3, H, W) with a Gaussian of its own; sigma: (B, 1, 1, 1), in pixels."""
    size, channels = BLUR["kernel_size"], images.shape[1]
    end = size // 2 / 2**0.5
    kernels = (torch.linspace(-end, end, size, device=images.device) / sigma.view(-1, 1)).pow(2).neg().softmax(1)
    kernels = (kernels[:, :, None] * kernels[:, None, :])[:, None].repeat_interleave(channels, 0)
    padded = F.pad(images.float(), [size // 2] * 4, mode="reflect").flatten(0, 1)
    return F.conv2d(padded[None], kernels, groups=len(padded)).view(images.shape).round_().to(torch.uint8)


def _apply(images: Tensor, name: str, magnitude: float, strength: Tensor) -> Tensor:
    """Images (B, 3, H, W) of type uint8 after an operation, to the bit as torchvision makes them one by one.

    Args:
        images: any that have the same operation.
        name, magnitude: see `Step`.
        strength: (B, 1, 1, 1), see `Step`.
    """
    if name == "RandomGrayscale":
        return rgb_to_grayscale(images, num_output_channels=3)
    if name == "RandomSolarize":
        return solarize(images, SOLARIZED)
    if name == "GaussianBlur":
        return _blur(images, strength)
    if name == "brightness":
        return images.mul(strength).clamp_(0, 255).to(torch.uint8)
    if name in ("contrast", "saturation"):
        grey = rgb_to_grayscale(images).float()
        return _blend(images, grey.mean((1, 2, 3), keepdim=True) if name == "contrast" else grey, strength)
    how = {"interpolation": RAND_AUGMENT.interpolation, "fill": RAND_AUGMENT._fill}
    return RAND_AUGMENT._apply_image_or_video_transform(images, name, magnitude, **how)


def _apply_all(images: Tensor, steps: Iterable[Step]) -> None:
    """Apply to each image of a batch its step, in place, all that have the same one together."""
    at_once = len(images)
    if images.device.type == "cpu":
        at_once = max(1, PIXELS_ON_CPU // images[0, 0].numel())
    places_of = defaultdict(list)
    for place, step in enumerate(steps):
        places_of[step.name, step.magnitude].append((place, step.strength))
    groups = [(how, own[i : i + at_once]) for how, own in places_of.items() for i in range(0, len(own), at_once)]
    places, strengths = zip(*(one for _, own in groups for one in own), strict=True)
    sizes = [len(own) for _, own in groups]
    places = to_device(torch.tensor(places), images.device).split(sizes)
    strengths = to_device(torch.tensor(strengths), images.device).view(-1, 1, 1, 1).split(sizes)
    for (how, _), chosen, strength in zip(groups, places, strengths, strict=True):
        images[chosen] = _apply(images[chosen], *how, strength)


def erase(images: Tensor, erased: Erased) -> None:
    """Replace parts of normalised images (B, 3, H, W) by noise, in place."""
    chosen, rectangles, noise = (to_device(torch.from_numpy(part), images.device) for part in erased)
    corner, size = rectangles[:, :2, None], rectangles[:, 2:, None]
    pixels = torch.arange(max(images.shape[2:]), device=images.device)
    rows, columns = ((corner <= pixels) & (pixels < corner + size)).unbind(1)  # (E, pixels)
    mask = rows[:, None, : images.shape[2], None] & columns[:, None, None, : images.shape[3]]
    images[chosen] = images[chosen].masked_scatter_(mask, noise.to(images.dtype))


class Augment:
    """Augments images, each with random numbers of its own, all those together that have the same operation.

    The random numbers depend on the seed, the epoch and the number of the image only, so that they are the same in
    every layout and in a run that resumes. The random numbers of the training are left as they are.

    Args:
        config: of the run; its block `augment` says how.
    """

    def __init__(self, config: Config):
        self.seed, self.draws = config.SEED, _Draws(**(config.augment or {}))

    @property
    def does_anything(self) -> bool:
        """Whether images are changed at all."""
        return bool(self.draws.transforms)

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
        images = images.round().to(torch.uint8) if images.is_floating_point() else images.clone()
        blank = torch.empty(images.shape[1:], dtype=torch.uint8)
        steps, erased = [], []
        with cpu_seed(self.seed), _one_thread():
            for place, number in enumerate(numbers.tolist()):
                seed = np.random.SeedSequence((self.seed, epoch, number)).generate_state(1, np.uint64)
                torch.default_generator.manual_seed(int(seed[0]))  # torch.manual_seed would seed GPUs, too
                self.draws.draw(blank)
                steps.append(self.draws.steps)
                if self.draws.erased:
                    *rectangle, noise = self.draws.erased
                    erased.append((place, rectangle, noise.flatten().numpy()))
            for turn in zip(*steps, strict=True):
                _apply_all(images, turn)
        images = images.to(mean.dtype).sub_(mean).div_(std)
        if erased:
            places, rectangles, noise = zip(*erased, strict=True)
            erase(images, Erased(np.array(places), np.array(rectangles), np.concatenate(noise)))
        return images
