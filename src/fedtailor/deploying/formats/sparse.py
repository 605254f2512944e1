"""``.sparse.safetensors``: of methods that leave out single weights, the others and one bit for each weight.

The file is small; inference gains nothing, because the zeros are put back before the network runs.
"""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from fedtailor.deploying.formats.base import Format, Program
from fedtailor.deploying.formats.safetensors_file import preparation_of, with_tensors
from fedtailor.deploying.inputs import Inputs, answers_of
from fedtailor.deploying.network import Network
from fedtailor.errors import FedtailorError
from fedtailor.storage.sparse_file import inputs_in, load_sparse, sparse_bytes


class Sparse(Format):
    """Weights by their names, without those that a mask left out."""

    name, suffix = "sparse", ".sparse.safetensors"
    needs_class = True
    int8 = ""

    def pack(self, network: Network, calibration: Inputs | None) -> bytes:
        if calibration is not None:
            raise FedtailorError("--quantize int8: expected another format than sparse, which keeps floats")
        if len(network.patches) > 1 or network.patches[0].cut.sparse is None:
            raise FedtailorError(
                f"--format sparse: the network for {network.name} leaves out no single weights (ofa-fl does); expected "
                "--format safetensors"
            )
        keywords = list(network.example.kwargs)
        return sparse_bytes(network.patches[0], network.model.groups.ties, network.about, keywords)

    def open(self, file: Path, module: nn.Module | None = None) -> Program:
        if module is None:
            raise FedtailorError(
                f"{file} holds the weights of a network alone; expected the network at full size"
            )
        network = with_tensors(copy.deepcopy(module), load_sparse(file), str(file)).eval()
        prepare = preparation_of(inputs_in(file).get("preparation"))
        return lambda inputs: answers_of(network, prepare(inputs))
