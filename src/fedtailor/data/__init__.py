"""Data sets, the user's own data, and how they are spread over clients."""

from fedtailor.data.batches import Batch, Examples, Preparation, batch_size, inputs_of, target_of
from fedtailor.data.datasets import Dataset, dataset_names, describe, load_dataset, load_federated
from fedtailor.data.federated import DataSettings, FederatedData, federate
from fedtailor.data.partitions import Partition
from fedtailor.data.transforms import ImagePreparation, Standardisation
from fedtailor.data.vocabulary import Vocabulary

__all__ = [
    "Batch",
    "DataSettings",
    "Dataset",
    "Examples",
    "FederatedData",
    "ImagePreparation",
    "Partition",
    "Preparation",
    "Standardisation",
    "Vocabulary",
    "batch_size",
    "dataset_names",
    "describe",
    "federate",
    "inputs_of",
    "load_dataset",
    "load_federated",
    "target_of",
]
