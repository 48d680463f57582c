"""ONNX files of networks and models that other libraries export: FOLDER/NAME.EXPORTER.onnx.

Run with an interpreter that has torch, torchvision, timm, transformers, onnxscript, scikit-learn,
lightgbm, xgboost, skl2onnx and onnxmltools (benchmarks/requirements-oracles.txt):

    .venv-oracles/bin/python -m benchmarks.oracles.exports FOLDER [--only PATTERN]

Weights are random and sizes small, so nothing is downloaded. Beside each file lies NAME.npz: inputs
as `a:NAME` and `b:NAME` (two sets of sizes, where the network has open sizes), and for the networks
in `GRADIENTS` the loss, each parameter as `param:NAME` and its gradient as `grad:NAME`. A network
that its exporter refuses is listed in FOLDER/NAME.EXPORTER.txt with the exporter's reason.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

OPSETS: Final = {"legacy": 17, "dynamo": 18}
GRADIENTS: Final = frozenset({
    "tv_resnet18", "tv_mobilenet_v2", "tv_vit", "timm_convnext_atto", "timm_deit_tiny",
    "hf_bert", "hf_llama", "hf_gpt2", "own_unet", "own_lstm", "hf_distilbert", "timm_mixer",
})  # fmt: skip
"""Networks whose gradients are compared."""


def without_detection() -> None:
    """Lets torchvision load where its compiled kernels do not fit this build of torch."""
    try:
        import torchvision  # noqa: F401 - the import is what is tried
    except RuntimeError:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", signature)


@dataclass(frozen=True)
class Network:
    """A network, two sets of inputs, and names of the open axes of each input."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Sequence[torch.Tensor]]
    axes: Sequence[dict[int, str]]
    pick: Callable[[Any], Any] = lambda y: y


class First(nn.Module):
    """A network by positional inputs that gives one tensor or a tuple of them."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.net = network.make().eval()
        self.pick = network.pick

    def forward(self, *xs: torch.Tensor) -> Any:
        """The outputs that are compared."""
        return self.pick(self.net(*xs))


def image(size: int, channels: int = 3) -> Callable[[int], Sequence[torch.Tensor]]:
    """A batch of 2, then of 3."""
    return lambda k: [torch.rand(2 + k, channels, size, size)]


BATCH: Final[Sequence[dict[int, str]]] = ({0: "N"},)


def vision(name: str, size: int = 64, **options: Any) -> Network:
    """A classifier of torchvision."""

    def make() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **{"num_classes": 10, **options})

    return Network(make, image(size), BATCH)


def segments(name: str, size: int = 64) -> Network:
    """A segmentation network of torchvision."""

    def make() -> nn.Module:
        import torchvision

        options = {"weights": None, "weights_backbone": None, "num_classes": 5}
        return torchvision.models.get_model(name, **options)

    return Network(make, image(size), BATCH, lambda y: y["out"])


def tv_vit() -> nn.Module:
    """A small Vision Transformer of torchvision."""
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)


def tv_swin() -> nn.Module:
    """A small Swin Transformer of torchvision."""
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer([2, 2], 16, [1, 2], [2, 4], [4, 4], num_classes=10)


def tv_convnext() -> nn.Module:
    """A small ConvNeXt of torchvision."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=10)


def timms(name: str, size: int = 64, **options: Any) -> Network:
    """A network of timm."""

    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **options)

    return Network(make, image(size), BATCH)


TEXT: Final[Sequence[dict[int, str]]] = ({0: "N", 1: "T"}, {0: "N", 1: "T"})
IDS: Final[Sequence[dict[int, str]]] = ({0: "N", 1: "T"},)


def masked(k: int) -> Sequence[torch.Tensor]:
    """Token ids and a mask of which one row ends early."""
    ids = torch.randint(3, 60, (2 + k, 8 + 3 * k))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return [ids, mask]


def tokens(k: int) -> Sequence[torch.Tensor]:
    """Token ids alone."""
    return [torch.randint(3, 60, (2 + k, 8 + 3 * k))]


SMALL: Final[dict[str, Any]] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def hugging(
    config: str,
    model: str,
    inputs: Any = masked,
    axes: Any = TEXT,
    pick: Any = None,
    **options: Any,
) -> Network:
    """A network of transformers from its configuration."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**options)
        made.use_cache = False
        return getattr(transformers, model)(made)

    return Network(make, inputs, axes, pick or (lambda y: y[0]))


class Keywords(nn.Module):
    """A model of transformers called by the names of its inputs."""

    def __init__(self, net: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.net, self.names = net, names

    def forward(self, *xs: torch.Tensor) -> Any:
        """As the model."""
        return self.net(**dict(zip(self.names, xs, strict=True)))


def named(network: Network, *names: str) -> Network:
    """`network` with its inputs given by keyword."""
    return Network(
        lambda: Keywords(network.make(), names), network.inputs, network.axes, network.pick
    )


class UNet(nn.Module):
    """Three levels with skips; odd sizes are padded to the skip's."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

        self.down1, self.down2, self.mid = block(3, 8), block(8, 16), block(16, 16)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.out2, self.out1, self.last = block(32, 16), block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, 3, H, W)."""
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.mid(self.pool(b))
        b = self.out2(torch.cat([self.up2(c), b], 1))
        return self.last(self.out1(torch.cat([self.up1(b), a], 1)))


class Strided(nn.Module):
    """Strided convolutions down, doubling up: 2*((H+2)//4) meets H//2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, 3, H, W)."""
        a = self.first(x).relu()
        b = self.second(a).relu()
        b = nn.functional.interpolate(b, scale_factor=2.0)
        return self.last(torch.cat([a, b], 1))


class Tagger(nn.Module):
    """Embedding, LSTM and a score per token, over unknown lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 12, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (N, T)."""
        return self.head(self.lstm(self.embed(ids))[0])


class Pairs(nn.Module):
    """`view(N, -1, 2)` of an unknown length, with attention over the pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, T) with an even T."""
        pairs = x.view(x.size(0), -1, 2)
        return self.head(self.block(self.lift(pairs)).mean(1))


class Detector(nn.Module):
    """Convolutions and a head of a YOLO: grids, sigmoid, boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Conv2d(32, 3 * 9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, 3, H, W) -> (N, boxes, 9)."""
        y = self.head(self.body(x))
        n, _, h, w = y.shape
        y = y.view(n, 3, 9, h, w).permute(0, 1, 3, 4, 2).sigmoid()
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack([columns, rows], -1).view(1, 1, h, w, 2).to(y.dtype)
        xy = (y[..., :2] * 2 - 0.5 + grid) * 4
        wh = (y[..., 2:4] * 2) ** 2
        return torch.cat([xy, wh, y[..., 4:]], -1).reshape(n, -1, 9)


def plane(k: int) -> Sequence[torch.Tensor]:
    """Planes of 16 by 24, then of 32 by 20."""
    return [torch.rand(2 + k, 3, 16 + 16 * k, 24 - 4 * k)]


PLANE: Final[Sequence[dict[int, str]]] = ({0: "N", 2: "H", 3: "W"},)
SEEN: Final = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
T5: Final = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip


def paired(k: int) -> Sequence[torch.Tensor]:
    """Ids of a source and of a target."""
    return [*tokens(k), torch.randint(3, 60, (2 + k, 5 + k))]


PAIRED: Final = ({0: "N", 1: "T"}, {0: "N", 1: "U"})


def heard(k: int) -> Sequence[torch.Tensor]:
    """A spectrogram, ids of a target, their mask."""
    ids = torch.randint(3, 60, (2 + k, 5 + k))
    return [torch.rand(2 + k, 20, 40), ids, torch.ones_like(ids)]


def spoken(k: int) -> Sequence[torch.Tensor]:
    """Waves."""
    return [torch.rand(2 + k, 1600)]


NETWORKS: Final[dict[str, Network]] = {
    "tv_resnet18": vision("resnet18"),
    "tv_mobilenet_v2": vision("mobilenet_v2"),
    "tv_mobilenet_v3_small": vision("mobilenet_v3_small"),
    "tv_shufflenet": vision("shufflenet_v2_x0_5"),
    "tv_squeezenet": vision("squeezenet1_1"),
    "tv_mnasnet": vision("mnasnet0_5"),
    "tv_efficientnet_b0": vision("efficientnet_b0"),
    "tv_densenet121": vision("densenet121"),
    "tv_regnet": vision("regnet_y_400mf"),
    "tv_googlenet": vision("googlenet", 96, aux_logits=False, init_weights=False),
    "tv_vit": Network(tv_vit, image(32), BATCH),
    "tv_swin": Network(tv_swin, image(32), BATCH),
    "tv_convnext": Network(tv_convnext, image(32), BATCH),
    "tv_lraspp": segments("lraspp_mobilenet_v3_large"),
    "tv_deeplab": segments("deeplabv3_mobilenet_v3_large"),
    "timm_deit_tiny": timms("deit_tiny_patch16_224", 32, img_size=32, depth=2, embed_dim=48),
    "timm_vit_tiny": timms("vit_tiny_patch16_224", 32, img_size=32, depth=2, embed_dim=48),
    "timm_swin": timms("swin_tiny_patch4_window7_224", 56, img_size=56, depths=(2, 2), embed_dim=24,
                       num_heads=(2, 4)),
    "timm_mixer": timms("mixer_s32_224", 64, img_size=64),
    "timm_resmlp": timms("resmlp_12_224", 64, img_size=64),
    "timm_convnext_atto": timms("convnext_atto"),
    "timm_edgenext": timms("edgenext_xx_small"),
    "timm_mobilevit": timms("mobilevit_xxs"),
    "timm_ghostnet": timms("ghostnet_100"),
    "timm_mobilenetv4": timms("mobilenetv4_conv_small_050"),
    "timm_efficientvit": timms("efficientvit_b0"),
    "timm_fastvit": timms("fastvit_t8", 128),
    "timm_repvgg": timms("repvgg_a0"),
    "timm_poolformer": timms("poolformer_s12"),
    "timm_tinynet": timms("tinynet_e"),
    "timm_levit": timms("levit_128s", 224),
    "timm_xcit": timms("xcit_nano_12_p16_224", 64),
    "timm_pit": timms("pit_ti_224", 224),
    "timm_lcnet": timms("lcnet_050"),
    "hf_bert": hugging("BertConfig", "BertModel", **SMALL),
    "hf_distilbert": hugging("DistilBertConfig", "DistilBertModel", vocab_size=64, dim=32,
                             n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64),
    "hf_roberta": hugging("RobertaConfig", "RobertaModel", **SMALL),
    "hf_electra": hugging("ElectraConfig", "ElectraModel", **SMALL, embedding_size=16),
    "hf_albert": hugging("AlbertConfig", "AlbertModel", **SMALL, embedding_size=16),
    "hf_mpnet": hugging("MPNetConfig", "MPNetModel", **SMALL),
    "hf_deberta": hugging("DebertaV2Config", "DebertaV2Model", **SMALL),
    "hf_gpt2": named(hugging("GPT2Config", "GPT2LMHeadModel", masked, TEXT, vocab_size=64,
                             n_embd=32, n_layer=2, n_head=4, n_positions=64),
                       "input_ids", "attention_mask"),
    "hf_llama": named(hugging("LlamaConfig", "LlamaForCausalLM", masked, TEXT, **SMALL,
                        num_key_value_heads=2),
                       "input_ids", "attention_mask"),
    "hf_mistral": named(hugging("MistralConfig", "MistralForCausalLM", masked, TEXT, **SMALL,
                          num_key_value_heads=2),
                       "input_ids", "attention_mask"),
    "hf_qwen2": named(hugging("Qwen2Config", "Qwen2ForCausalLM", masked, TEXT, **SMALL,
                        num_key_value_heads=2),
                       "input_ids", "attention_mask"),
    "hf_opt": hugging("OPTConfig", "OPTModel", masked, TEXT, vocab_size=64, hidden_size=32,
                      num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
                      max_position_embeddings=64, word_embed_proj_dim=32),
    "hf_bloom": hugging("BloomConfig", "BloomModel", tokens, IDS, vocab_size=64, hidden_size=32,
                        n_layer=2, n_head=4),
    "hf_gptneox": named(hugging("GPTNeoXConfig", "GPTNeoXForCausalLM", masked, TEXT, **SMALL),
                       "input_ids", "attention_mask"),
    "hf_t5_encoder": hugging("T5Config", "T5EncoderModel", tokens, IDS, **T5),
    "hf_t5": named(hugging("T5Config", "T5ForConditionalGeneration", paired, PAIRED, **T5),
                   "input_ids", "decoder_input_ids"),
    "hf_bart": named(hugging("BartConfig", "BartModel", paired, PAIRED, vocab_size=64, d_model=32,
                             encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                             decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                             max_position_embeddings=64),
                     "input_ids", "decoder_input_ids"),
    "hf_whisper": named(hugging("WhisperConfig", "WhisperForConditionalGeneration", heard,
                                ({0: "N"}, {0: "N", 1: "U"}, {0: "N", 1: "U"}),
                                vocab_size=64, num_mel_bins=20, d_model=32,
                                encoder_layers=2, decoder_layers=2,
                                encoder_attention_heads=4, decoder_attention_heads=4,
                                encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
                                max_target_positions=32, pad_token_id=0, bos_token_id=1,
                                eos_token_id=2, decoder_start_token_id=1),
                        "input_features", "decoder_input_ids", "decoder_attention_mask"),
    "hf_wav2vec2": hugging("Wav2Vec2Config", "Wav2Vec2ForCTC", spoken, BATCH, vocab_size=32,
                           hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=48, conv_dim=(16, 16, 16), conv_stride=(5, 4, 4),
                           conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16,
                           num_conv_pos_embedding_groups=4, num_feat_extract_layers=3),
    "hf_vit": hugging("ViTConfig", "ViTForImageClassification", image(32), BATCH, **SEEN),
    "hf_deit": hugging("DeiTConfig", "DeiTForImageClassification", image(32), BATCH, **SEEN),
    "hf_swin": hugging("SwinConfig", "SwinForImageClassification", image(32), BATCH, image_size=32,
                       patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "hf_segformer": hugging("SegformerConfig", "SegformerForSemanticSegmentation", image(64), BATCH,
                            depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32],
                            decoder_hidden_size=32),
    "own_unet": Network(UNet, plane, PLANE),
    "own_strided": Network(Strided, plane, PLANE),
    "own_lstm": Network(Tagger, tokens, IDS),
    "own_pairs": Network(Pairs, lambda k: [torch.rand(2 + k, 8 + 4 * k)], IDS),
    "own_detector": Network(Detector, plane, PLANE),
}  # fmt: skip


def seeded(module: nn.Module) -> None:
    """Fills running statistics and small parameters so that no layer is an identity."""
    generator = torch.Generator().manual_seed(7)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
        elif name.endswith("running_var"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any() or bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def export(name: str, exporter: str, folder: Path) -> None:
    """Writes one network's file and its arrays."""
    torch.manual_seed(3)
    network = NETWORKS[name]
    model = First(network).eval()
    seeded(model)
    torch.manual_seed(11)
    sets = {"a": list(network.inputs(0)), "b": list(network.inputs(1))}
    inputs = [f"x{i}" for i in range(len(sets["a"]))]
    arrays = {
        f"{k}:{n}": x.numpy() for k, xs in sets.items() for n, x in zip(inputs, xs, strict=True)
    }
    path = folder / f"{name}.{exporter}.onnx"
    common: dict[str, Any] = {"input_names": inputs, "output_names": ["y"],
                              "opset_version": OPSETS[exporter]}  # fmt: skip
    if exporter == "legacy":
        axes = dict(zip(inputs, network.axes, strict=True))
        torch.onnx.export(
            model, tuple(sets["a"]), str(path), dynamo=False, dynamic_axes=axes, **common
        )
    else:
        dims: dict[str, Any] = {}
        shapes = tuple(
            {i: dims.setdefault(n, torch.export.Dim.DYNAMIC) for i, n in axes.items()}
            for axes in network.axes
        )
        torch.onnx.export(
            model, tuple(sets["a"]), str(path), dynamo=True, dynamic_shapes=(shapes,),
            external_data=False, verbose=False, **common,
        )  # fmt: skip
    with torch.no_grad():
        for k, xs in sets.items():
            arrays[f"{k}=y"] = model(*xs).numpy()
    if name in GRADIENTS:
        loss = (model(*sets["a"]) ** 2).mean()
        loss.backward()
        arrays["loss"] = loss.detach().numpy()
        for parameter, value in model.named_parameters():
            if value.grad is not None:
                arrays[f"param:{parameter}"] = value.detach().numpy()
                arrays[f"grad:{parameter}"] = value.grad.numpy()
    np.savez(folder / f"{name}.{exporter}.npz", **arrays)


def main() -> int:
    """Exports what `--only` names, by both exporters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a regular expression over NAME.EXPORTER")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    without_detection()
    for exporter in OPSETS:
        for name in NETWORKS:
            case = f"{name}.{exporter}"
            path = options.folder / f"{case}.npz"
            if not re.search(options.only, case) or path.exists():
                continue
            try:
                export(name, exporter, options.folder)
                print("exported", case, flush=True)
            except Exception as error:  # noqa: BLE001 - what an exporter raises is its own
                (options.folder / f"{case}.onnx").unlink(missing_ok=True)
                (options.folder / f"{case}.txt").write_text(traceback.format_exc())
                print("refused by its exporter", case, repr(error)[:200], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
