"""FIARSE: sub-models of the weights, or channels, of largest magnitude."""

from fedtailor.methods.fiarse import fiarse as fiarse
