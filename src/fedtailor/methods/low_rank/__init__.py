"""Adapters of different ranks: HetLoRA pads and truncates the factors, FlexLoRA merges and splits their products."""

from fedtailor.methods.low_rank import flexlora as flexlora
from fedtailor.methods.low_rank import hetlora as hetlora
