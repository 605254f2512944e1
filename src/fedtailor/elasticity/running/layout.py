"""Which memory layout a client's network runs in.

Channels-last is the faster one for convolutions on the CPU. Networks keep the ordinary one whose code needs it
(``x.view(len(x), -1)`` after a convolution), and those with narrow strided 1 x 1 convolutions that ``strided`` could
not change.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.elasticity.running.strided import is_strided_point


class Layouts:
    """The layout of every cut of a model: channels-last wherever that is safe."""

    def __init__(self, model: Pieces) -> None:
        self.model = model
        safe = model.strided if takes_channels_last(model) else {}  # which has run the network once
        self.pointwise = [
            f"{path}.weight"
            for path, layer in model.module.named_modules()
            if is_strided_point(layer) and not (path in safe and safe[path].ran)
        ]

    def at(self, cut: Cut) -> torch.memory_format:
        """The layout in which to train a cut."""
        if not takes_channels_last(self.model):
            return torch.contiguous_format
        known = self.model.groups.extents  # a weight that is computed from others is not
        narrow = any(
            name not in known or self.model.shape(name, cut.unmasked)[1] < _vector_length()
            for name in self.pointwise
        )
        return torch.contiguous_format if narrow else torch.channels_last


def takes_channels_last(model: Pieces) -> bool:
    """Whether ``forward`` runs on feature maps in channels-last layout: ``view`` may ask for the ordinary one."""

    def tried() -> bool:
        weights = model.weights()
        maps = {name: value for name, value in weights.items() if value.dim() == 4}
        try:
            # A traced graph that fails prints its own code before it raises.
            with torch.no_grad(), torch.random.fork_rng(devices=[]), redirect_stderr(io.StringIO()):
                if maps:
                    weights |= laid_out(maps, torch.channels_last)
                    model.forward(weights, Cut.everything(), model.example)
        except RuntimeError:  # what is wrong with forward itself is said where it runs in the ordinary layout
            return False
        return True

    return model.once("takes channels-last", tried)


def laid_out(values: Mapping[str, Tensor], layout: torch.memory_format) -> dict[str, Tensor]:
    """Copies of the weights of convolutions in a layout; everything else as it is.

    Only a copy changes the strides of weights with one input channel or one pixel, which are right for both layouts.
    """
    return {
        name: value.clone(memory_format=layout) if value.dim() == 4 else value
        for name, value in values.items()
    }


def to_run(model: Pieces, patch: Patch) -> Patch:
    """A patch as it runs fastest where no gradient is taken: nothing packed, and channels-last where code allows it."""
    whole = model.spread(patch)
    layout = torch.channels_last if takes_channels_last(model) else torch.contiguous_format
    return Patch(laid_out(whole.values, layout), whole.cut)


def _vector_length() -> int:
    """How many float32 numbers oneDNN's kernels handle at once on this processor."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
