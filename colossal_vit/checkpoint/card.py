"""The model card of an export: what its README.md says, all of it from the run's files."""

import json
import math
from pathlib import Path
from typing import Any

import timm
from colossal_vit.checkpoint.contents import State
from colossal_vit.data.loaders import SAMPLE, recorded
from torch import nn

LICENCE = "unknown"  # a value that model hubs take
OF_THIS_MACHINE = ("DATA", "LOADER")  # keys of the config that are paths

TIMM = """
```python
import timm
from PIL import Image

model = timm.create_model("local-dir:.", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
logits = model(transform(Image.open("photo.jpg").convert("RGB"))[None])
print(model.pretrained_cfg["label_names"][logits.argmax()])
```
"""
TRANSFORMERS = """
```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained(".").eval()
inputs = AutoImageProcessor.from_pretrained(".")(Image.open("photo.jpg").convert("RGB"), return_tensors="pt")
logits = model(**inputs).logits
print(model.config.id2label[logits.argmax().item()])
```
"""
ONNXRUNTIME = """
```python
import json

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession("model.onnx")
image = Image.open("photo.jpg").convert("RGB")
image = image.resize([side * {resized} // min(image.size) for side in image.size], Image.Resampling.BILINEAR)
left, top = (round((side - {size}) / 2) for side in image.size)
pixels = np.asarray(image.crop((left, top, left + {size}, top + {size})))[None]
(logits,) = session.run(["logits"], {{"pixels": pixels}})
print(json.loads(session.get_modelmeta().custom_metadata_map["classes"])[logits.argmax()])
```
"""


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """Return how an image becomes the pixels of a model: `resized` and `size` are of sides, in pixels."""
    config = timm.data.resolve_model_data_config(model)
    size = config["input_size"][-1]
    return {
        "resized": math.floor(size / config["crop_pct"]),  # as timm rounds it
        "size": size,
        "mean": list(config["mean"]),
        "std": list(config["std"]),
    }


def write_card(
    model: nn.Module, state: State, dtype: str, ema: bool, accuracy: float | None, proof: dict[str, Any], onnx: bool
) -> str:
    """Return a model card in Markdown.

    Args:
        model: that was exported, from `load_model`.
        state: of its checkpoint.
        dtype: of the weights, in words.
        ema: whether these are moving averages.
        accuracy: that the run has recorded for these weights, if it has.
        proof: the contents of proof.json.
        onnx: whether there is an ONNX file.
    """
    config, data = state["config"], state.get("data") or {}
    classes = model.pretrained_cfg.get("label_names") or []
    pixels, architecture = preprocessing(model), model.pretrained_cfg["architecture"]
    images, sample = data.get("images", "an unknown format"), recorded(SAMPLE)
    is_sample = Path((state.get("source") or {}).get("folder", "")).is_relative_to(sample)
    weights = f"the moving averages of the weights (decay {config['ema']['decay']})" if ema else "the weights"
    tuned = (config.get("finetune") or {}).get("weights")
    recipe = {key: value for key, value in config.items() if key not in OF_THIS_MACHINE}
    lines = [
        "---",
        f"license: {LICENCE}  # fill in, with that of the training images and of the weights it began with in mind",
        "library_name: timm",
        "pipeline_tag: image-classification",
        "---",
        "",
        f"# {architecture} for {model.num_classes} classes",
        "",
        f"A Vision Transformer of {sum(p.numel() for p in model.parameters()):,} parameters: {weights} after "
        f"{state['step']:,} optimizer steps, in {dtype}.",
        "",
        "**Licence: not filled in yet.** Whoever publishes this model chooses it, here and in the first lines.",
        "",
        "## Accuracy",
        "",
    ]
    if accuracy is not None:
        tested = f" ({data['test images']:,} images)" if "test images" in data else ""
        lines += [f"Test accuracy in training, as the run has recorded it: {accuracy:.2%}{tested}."]
    else:
        lines += ["The run has recorded no test accuracy of these weights."]
    lines += ["", *say_proof(proof), "", "## Data", ""]
    lines += ["The sample of this repository: scikit-learn's scanned digits."] if is_sample else []
    if "training images" in data:
        lines += [f"{data['training images']:,} images for training and {data['test images']:,} for testing, read as"]
    lines += [f"{images}; digest of what was read: `{data.get('content')}`.", ""]
    lines += [f"Classes, in the order of the logits: {', '.join(classes)}." if classes else "Classes have no names."]
    lines += [
        "",
        "## Images",
        "",
        f"RGB. The shorter side is resized to {pixels['resized']} pixels, bilinearly with antialiasing, and the middle "
        f"{pixels['size']} x {pixels['size']} are cut out. Values from 0 to 1 are normalised with mean "
        f"{pixels['mean']} and standard deviation {pixels['std']}.",
        "",
        "## Use",
        "",
        "In this folder, with timm:",
        TIMM,
        "with transformers:",
        TRANSFORMERS,
    ]
    if onnx:
        lines += [
            "with onnxruntime, whose model normalises the pixels itself and takes any number of images; resizing and "
            "cropping are left to the caller, since ONNX's own resize makes other pixels. It computes in fp32:",
            ONNXRUNTIME.format(**pixels),
        ]
    began = f"It began with the weights of `{tuned}`." if tuned else "It began with random weights."
    lines += ["## Recipe", "", began, "The whole config:", "", "```json", json.dumps(recipe, indent=2), "```", ""]
    return "\n".join(lines)


def say_proof(proof: dict[str, Any]) -> list[str]:
    """Return lines about how far an export was compared with the model that was trained."""
    if not proof["images"]:
        return [f"Whether these files compute what was trained was not proven: {proof['not_proven']}."]
    found = ", ".join(f"{value:.1e} in {name}" for name, value in proof["largest_difference"].items())
    lines = [f"On {proof['images']:,} {proof['of']} the logits differ from the trained model's by at most {found}."]
    if "accuracy" in proof:
        lines += [f"Its accuracy on them is {proof['accuracy']:.2%}."]
    return lines
