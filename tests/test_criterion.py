"""Binary cross entropy equals timm's, for classes and for the targets of mixed images."""

import pytest
import torch
from colossal_vit.data.batches import IGNORED
from colossal_vit.engine.criterion import BinaryCrossEntropy, build_criterion
from colossalai.context import Config
from timm.data import mixup as timm_mixup
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy

import training

CLASSES = 5


@pytest.mark.parametrize("options", [{}, dict(threshold=0.2), dict(threshold=0.2, sum_classes=True)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_binary_cross_entropy_equals_timms(options, smoothing, soft):
    """timm leaves the smoothing of soft targets to its Mixup."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (6,), generator=generator)
    theirs = dict(smoothing=smoothing, sum_classes=options.get("sum_classes", False))
    expected = TimmBinaryCrossEntropy(**theirs, target_threshold=options.get("threshold"))
    if soft:
        smoothed = timm_mixup.mixup_target(labels, CLASSES, lam=0.7, smoothing=smoothing)
        labels = timm_mixup.mixup_target(labels, CLASSES, lam=0.7)
        torch.testing.assert_close(BinaryCrossEntropy(smoothing, **options)(logits, labels), expected(logits, smoothed))
    else:
        torch.testing.assert_close(BinaryCrossEntropy(smoothing, **options)(logits, labels), expected(logits, labels))
        filled = torch.cat([labels, torch.tensor([IGNORED, IGNORED])])
        more = torch.cat([logits, torch.randn(2, CLASSES)])
        torch.testing.assert_close(BinaryCrossEntropy(smoothing, **options)(more, filled), expected(logits, labels))


@pytest.mark.parametrize(("smoothing", "threshold"), [(0.0, 0.0), (0.1, 0.01), (0.1, 0.9099)])
def test_a_threshold_that_is_accepted_tells_the_classes_apart(smoothing, threshold):
    settings = Config(dict(LABEL_SMOOTHING=smoothing, NUM_CLASSES=10, bce={"threshold": threshold}))
    labels, logits = torch.arange(10), 20 * torch.eye(10) - 10
    assert build_criterion(settings)(logits, labels) < 1e-4
    assert build_criterion(settings)(logits, labels.flip(0)) > 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"bce.threshold": 0.0}, "bce.threshold = 0.0: all targets would be 1"),
        ({"bce.threshold": 0.91}, "bce.threshold = 0.91: all targets would be 0"),
        ({"bce.threshold": 1.0, "LABEL_SMOOTHING": 0.0}, "set it to at least 0 and below 1"),
    ],
)
def test_criterion_with_a_mistaken_setting_is_refused_in_one_line(values, words, tmp_path):
    assert words in training.refused(tmp_path / "run", **values)
    assert not (tmp_path / "run").exists()
