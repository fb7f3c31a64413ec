"""The table of docs/classifiers.md: input, parameters and multiply-adds, counted on shapes alone.

python benchmarks/tables/classifier_table.py            prints it
"""

from __future__ import annotations

from typing import Any

import torch

import sosampler as so

FRAMES = (1, 6, 8, 16, 32)

# name, options, where weights come from and which published checkpoint fits
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("resnet50", {}, "any torchvision or timm `resnet50` file; `pretrained` (timm)"),
    ("resnet50", {"head": "frameexit"}, "backbone from the same; the head is trained here"),
    ("resnet50_v1", {}, "Keras and Caffe ports: stride on the first 1x1 convolution"),
    ("any_precision_resnet50", {}, "those of a `resnet50`, then trained; 32, 4 or 2 bits"),
    ("timesformer", {}, "`hf:facebook/timesformer-base-finetuned-k400` and its like"),
    ("slowonly_r50", {}, "PyTorchVideo `SLOW_8x8_R50`, key for key; or inflated from a 2-D ResNet-50"),
    ("x3d_s", {}, "PyTorchVideo `X3D_S`, key for key"),
    ("i3d", {}, "I3D RGB with the layer names of TF-slim"),
    *(
        (f"torchvision:{model}", {}, "torchvision's `KINETICS400_V1` files; `pretrained`")
        for model in (
            "r3d_18",
            "mc3_18",
            "r2plus1d_18",
            "s3d",
            "mvit_v1_b",
            "mvit_v2_s",
            "swin3d_t",
            "swin3d_s",
            "swin3d_b",
        )
    ),
]


def gmacs(classifier: so.Classifier, num_frames: int) -> str:
    try:
        return f"{classifier.gmacs(num_frames):.2f}"
    except so.InvalidArgument:  # more frames than the network takes
        return "-"


def row(name: str, options: dict[str, Any], weights: str) -> str:
    with torch.device("meta"):
        classifier = so.create_classifier(name, **options)
    shown = f"`{name}`" + "".join(f", {key}={value}" for key, value in options.items())
    height, width = classifier.preprocessing.size
    counts = " | ".join(gmacs(classifier, count) for count in FRAMES)
    return f"| {shown} | {height}x{width} | {classifier.num_parameters / 1e6:.2f} | {counts} | {weights} |"


def table() -> str:
    head = "| name | input | M parameters | " + " | ".join(f"{count} f" for count in FRAMES) + " | weights |"
    rule = "|---|---|---|" + "---|" * len(FRAMES) + "---|"
    return "\n".join([head, rule, *(row(*given) for given in ROWS)])


if __name__ == "__main__":
    print(table())
