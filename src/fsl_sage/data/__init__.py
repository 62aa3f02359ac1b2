"""Images and texts, who holds them, and how they come in batches."""

from fsl_sage.data.batches import augment, batch_indices, batch_sizes, normalise
from fsl_sage.data.e2e import (
    Meaning,
    all_meanings,
    encode_prompts,
    find_e2e,
    held_out_meanings,
    load_e2e,
    load_tokenizer,
)
from fsl_sage.data.images import KNOWN_SIZES, ImageData, Images, Sizes
from fsl_sage.data.partition import client_sizes, partition
from fsl_sage.data.smollm2 import SMOLLM2
from fsl_sage.data.sources import fetch, load_images
from fsl_sage.data.texts import KNOWN_TEXTS, TextData, Texts, TextSizes

__all__ = [
    "KNOWN_SIZES",
    "KNOWN_TEXTS",
    "SMOLLM2",
    "ImageData",
    "Images",
    "Meaning",
    "Sizes",
    "TextData",
    "TextSizes",
    "Texts",
    "all_meanings",
    "augment",
    "batch_indices",
    "batch_sizes",
    "client_sizes",
    "encode_prompts",
    "fetch",
    "find_e2e",
    "held_out_meanings",
    "load_e2e",
    "load_images",
    "load_tokenizer",
    "normalise",
    "partition",
]
