"""Data sets and how they are divided among clients."""

from bflcore.data.base import Dataset, DataSource, centred, encoded
from bflcore.data.partition import PARTITIONERS, Partition, Partitioner, divide
from bflcore.data.sources import DATASETS

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "DataSource",
    "Dataset",
    "Partition",
    "Partitioner",
    "centred",
    "divide",
    "encoded",
]
