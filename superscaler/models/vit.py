"""Vision Transformer (Dosovitskiy et al. 2021) of the Hugging Face library, with the loss of image classification.

Sizes: base (86.6 million parameters, the default: 12 layers, hidden 768, 12 heads, MLP 3072, patch 16), large (304: 24
layers, hidden 1024, 16 heads, MLP 4096, patch 16) and huge (632: 32 layers, hidden 1280, 16 heads, MLP 5120, patch 14):
image 224, 1000 classes, batch 8, and no dropout, as in the family's config. tiny: 2 layers, hidden 48, 4 heads, MLP
160, image 20, patch 4, 10 classes.
"""

from __future__ import annotations

from torch import nn

from superscaler.models.huggingface import from_config, usual
from superscaler.models.huggingface import make_images as make_batch
from superscaler.specs.options import Options, check_divides

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"image": 224, "classes": 1000, "batch": 8, "dropout": 0.0}
_TINY = {"image": 20, "classes": 10, "batch": 8, "dropout": 0.0}
DEFAULT = "base"
OPTIONS = {
    "tiny": {"layers": 2, "hidden": 48, "heads": 4, "mlp": 160, "patch": 4, **_TINY},
    "base": {"layers": 12, "hidden": 768, "heads": 12, "mlp": 3072, "patch": 16, **_FAMILY},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, "mlp": 4096, "patch": 16, **_FAMILY},
    "huge": {"layers": 32, "hidden": 1280, "heads": 16, "mlp": 5120, "patch": 14, **_FAMILY},
}


def build(options: Options) -> nn.Module:
    """Return the module.

    Keys: size, layers, hidden, heads, mlp, image, patch, classes, batch, dropout, seed, device.
    """
    check_divides("vit", "hidden", "heads", options)
    check_divides("vit", "image", "patch", options)
    return from_config("ViTConfig", "ViTForImageClassification", **usual(options))
