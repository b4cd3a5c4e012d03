"""Swin Transformer v2 (Liu et al. 2022) of the Hugging Face library, with the loss of image classification.

Sizes: 1.8b (the default), 6.6b, 13b and 30b as in the paper's table: 32, 48, 56 and 64 layers, hidden 512, 768, 1024
and 1536, 16, 24, 32 and 32 heads, both of the first of 4 stages and twice as many in each that follows. The paper does
not say how the layers are spread; with 2 layers in the first two stages, and 2 (1.8b, 30b) or 4 (6.6b, 13b) in the
last, there are 1.79, 6.52, 13.2 and 30.6 billion parameters. Image 1536, patch 4, window 24, 1000 classes, batch 8,
drop path 0.1 as in the family's config. tiny: 2 stages of 2 layers, hidden 24, 4 heads, image 24, patch 2, window 3, 10
classes.
"""

from __future__ import annotations

from torch import nn

from superscaler.errors import InputError
from superscaler.models.huggingface import from_config, renamed, usual
from superscaler.models.huggingface import make_images as make_batch
from superscaler.specs.options import Options, check_divides

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"image": 1536, "patch": 4, "window": 24, "classes": 1000, "batch": 8, "dropout": 0.0, "drop_path": 0.1}
_TINY = {"image": 24, "patch": 2, "window": 3, "classes": 10}
DEFAULT = "1.8b"
OPTIONS = {
    "tiny": {"depths": "2-2", "hidden": 24, "heads": 4, **_FAMILY, **_TINY},
    "1.8b": {"depths": "2-2-26-2", "hidden": 512, "heads": 16, **_FAMILY},
    "6.6b": {"depths": "2-2-40-4", "hidden": 768, "heads": 24, **_FAMILY},
    "13b": {"depths": "2-2-48-4", "hidden": 1024, "heads": 32, **_FAMILY},
    "30b": {"depths": "2-2-58-2", "hidden": 1536, "heads": 32, **_FAMILY},
}


def build(options: Options) -> nn.Module:
    """Return the module.

    Keys: size, depths (layers of each stage, as 2-2-6-2), hidden, heads, image, patch, window, classes, batch, dropout,
    drop_path, seed, device.
    """
    check_divides("swin", "hidden", "heads", options)
    check_divides("swin", "image", "patch", options)
    depths = _depths(options["depths"])
    side, multiple = options["image"] // options["patch"], options["window"] << (len(depths) - 1)
    if side % multiple:
        raise InputError(
            f"swin: image={options['image']} with patch={options['patch']} makes {side} patches a side, but windows of "
            f"{options['window']} in {len(depths)} stages, each half as wide, need a multiple of {multiple}."
        )
    own = renamed(options, {"window": "window_size", "hidden": "embed_dim", "drop_path": "drop_path_rate"})
    own |= {"depths": depths, "num_heads": [options["heads"] << stage for stage in range(len(depths))]}
    shared = usual({k: options[k] for k in ("image", "patch", "classes", "dropout")})
    return from_config("Swinv2Config", "Swinv2ForImageClassification", **shared, **own)


def _depths(text: str) -> list[int]:
    words = text.split("-")
    if not all(word.isdecimal() and int(word) for word in words):
        raise InputError(f"swin: depths is '{text}', but it must be the layers of each stage, as 2-2-6-2.")
    return [int(word) for word in words]
