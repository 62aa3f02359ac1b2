"""Images, who holds them, and how they come in batches."""

from fsl_sage.data.batches import augment, batch_indices, batch_sizes, normalise
from fsl_sage.data.images import KNOWN_SIZES, ImageData, Images, Sizes
from fsl_sage.data.partition import client_sizes, partition
from fsl_sage.data.smollm2 import SMOLLM2
from fsl_sage.data.sources import fetch, load_images

__all__ = [
    "KNOWN_SIZES",
    "SMOLLM2",
    "ImageData",
    "Images",
    "Sizes",
    "augment",
    "batch_indices",
    "batch_sizes",
    "client_sizes",
    "fetch",
    "load_images",
    "normalise",
    "partition",
]
