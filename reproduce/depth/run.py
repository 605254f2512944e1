"""Pieces by width, by depth and by both, at equal multiply-accumulates, on Fashion-MNIST.

    FEDTAILOR_DATA=... python -m reproduce.depth.run [--list] [experiment ...]

What is compared is the order of methods that the papers report: DepthFL with distillation against DepthFL without
(table 4) and against HeteroFL (table 2), ScaleFL against HeteroFL (abstract), NeFL's worst sub-model against HeteroFL's
(table VII). Call it again after an interruption: finished runs are not repeated.
"""

from __future__ import annotations

from pathlib import Path

from reproduce.shared.papers import Experiment, Paper

FASHION = "reproduce/depth/fashion-mnist-small.toml"

METHODS = (
    "depthfl:ramp=30",
    "depthfl:distillation=false",
    "scalefl",
    "nefl",
    "heterofl:masked_loss=false:label_rows=false",
)

EXPERIMENTS = (
    Experiment("fashion-iid", FASHION, METHODS, 3),
    Experiment("fashion-dirichlet", FASHION, METHODS, 3, ("data.partition=dirichlet",)),
)

if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS).main()
