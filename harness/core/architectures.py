"""Architectures that need no download: they start from random weights. One table, plain values.

The sizes are those of the published models of the same name; nano is this project's own size for
--tiny. Each entry: the model type of transformers and the fields of its configuration that differ
from that type's default.
"""

from __future__ import annotations

from typing import Any


def _bert(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "bert", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, **{"intermediate_size": 4 * hidden, **more},
    }  # fmt: skip


def _vit(
    hidden: int, layers: int, heads: int, patch: int, image: int = 224, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "vit", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "patch_size": patch, "image_size": image,
        **{"intermediate_size": 4 * hidden, **more},
    }  # fmt: skip


def _resnet(layer: str, depths: list[int], hidden: list[int], **more: Any) -> dict[str, Any]:
    return {
        "model_type": "resnet", "layer_type": layer, "depths": depths, "hidden_sizes": hidden,
        "embedding_size": 64, **{"image_size": 224, **more},
    }  # fmt: skip


RESNET_18 = ("basic", [2, 2, 2, 2], [64, 128, 256, 512])


ARCHITECTURES: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {
        # Wider initial weights than usual: a model this narrow learns faster from them.
        "bert-nano": _bert(
            64,
            2,
            2,
            intermediate_size=128,
            vocab_size=4096,
            max_position_embeddings=64,
            initializer_range=0.05,
        ),
        "bert-tiny": _bert(128, 2, 2),
        "bert-mini": _bert(256, 4, 4),
        "bert-small": _bert(512, 4, 8),
        "bert-base": _bert(768, 12, 12),
        "bert-large": _bert(1024, 24, 16),
        "distilbert-base": {"model_type": "distilbert"},
    },
    "vit": {
        "vit-nano": _vit(64, 3, 4, patch=2, image=8, intermediate_size=128, initializer_range=0.1),
        "vit-tiny-patch16": _vit(192, 12, 3, patch=16),
        "vit-tiny-patch32": _vit(192, 12, 3, patch=32),
        "vit-small-patch16": _vit(384, 12, 6, patch=16),
        "vit-small-patch32": _vit(384, 12, 6, patch=32),
        "vit-base-patch16": _vit(768, 12, 12, patch=16),
        "vit-base-patch32": _vit(768, 12, 12, patch=32),
        "resnet-18": _resnet(*RESNET_18),
        # 3x3 first convolution and no pooling, as is usual for 32-pixel images: fifteen times the
        # work of resnet-18 at that size, and another experiment.
        "resnet-18-cifar": _resnet(*RESNET_18, image_size=32, cifar_stem=True),
        "resnet-34": _resnet("basic", [3, 4, 6, 3], [64, 128, 256, 512]),
        "resnet-50": _resnet("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
    },
}


def listing(script: str) -> str:
    """The table as text for --list_models."""
    lines = [f"Architectures for {script}.py that need no download (random weights):"]
    for name, config in ARCHITECTURES[script].items():
        facts = ", ".join(f"{k} {v}" for k, v in config.items())
        lines.append(f"  {name:<18} {facts}")
    return "\n".join(lines)
