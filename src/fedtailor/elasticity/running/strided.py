"""Strided 1 x 1 convolutions, of which PyTorch may run a kernel that writes where it must not.

In channels-last layout oneDNN writes outside its workspace when it computes the weight gradient of a strided 1 x 1
convolution with fewer input channels than one vector holds (https://github.com/uxlfoundation/oneDNN/issues/6035; seen
with PyTorch 2.13: the process dies, or worse, goes on). Narrow residual networks have such shortcuts. A 1 x 1
convolution looks at no pixel but its own, so it may as well be run with a stride of one on every other pixel.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.functional import conv2d


class OnKeptPixels(nn.Conv2d):
    """A strided 1 x 1 convolution that leaves out pixels first; ``ran``: code calls it, and not its weight alone."""

    ran = False

    def forward(self, input: Tensor) -> Tensor:
        """The same numbers, up to rounding."""
        self.ran = True
        down, across = self.stride
        kept = input[..., ::down, ::across]
        return conv2d(kept, self.weight, self.bias, 1, 0, self.dilation, self.groups)


def is_strided_point(layer: nn.Module) -> bool:
    """Whether a layer is one that could run into that kernel."""
    return isinstance(layer, nn.Conv2d) and set(layer.kernel_size) == {1} and max(layer.stride) > 1


def leave_out_pixels_first(module: nn.Module) -> dict[str, OnKeptPixels]:
    """Change such layers of PyTorch's own class in place, by their paths; what users derive from it stays as it is."""
    found = {}
    for path, layer in module.named_modules():
        if type(layer) is nn.Conv2d and is_strided_point(layer) and layer.padding in ((0, 0), "valid"):
            layer.__class__ = OnKeptPixels
            found[path] = layer
    return cast(dict[str, OnKeptPixels], found)
