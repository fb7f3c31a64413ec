"""Video networks as plain modules: float clips [B, 3, T, H, W] in, logits [B, num_classes] out."""

from __future__ import annotations

from sosampler.classifiers.nets.i3d import I3D, i3d
from sosampler.classifiers.nets.inflation import inflate_resnet50
from sosampler.classifiers.nets.resnet3d import SlowOnly, slowonly_r50
from sosampler.classifiers.nets.x3d import X3D, x3d_s

__all__ = ["I3D", "X3D", "SlowOnly", "i3d", "inflate_resnet50", "slowonly_r50", "x3d_s"]
