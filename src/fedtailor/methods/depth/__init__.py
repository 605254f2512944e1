"""Pieces that are less deep: the first blocks and an exit (DepthFL, ScaleFL), or some blocks of every chain (NeFL)."""

from fedtailor.methods.depth import depthfl as depthfl
from fedtailor.methods.depth import nefl as nefl
from fedtailor.methods.depth import scalefl as scalefl
