"""How arrays are written for the way, so that fewer bytes travel. Both halves of a codec are one class.

**Array codecs** have no state. Each makes one array a payload, a flat array of bytes, and reads it back:

    casts        two bytes a number (fp16, bf16)
    quantise     8, 4 or 2 bits a number between the least and the greatest of a group, rounded at random or not
    sparse       the largest numbers and where they are (topk), or with some others at random (randtopk)
    integers     labels in the smallest type that holds them
    compressed   any of these, and zstd behind it

The name of an array that was coded says what it was: `conv1.weight@float32[64,3,3,3]`. Names are framing, as in every
file of tensors; the ledger counts payloads. So a receiver knows from the name alone how long a payload must be, and
refuses another before it takes memory for it. What is not coded keeps its name and its bytes: whole numbers, and of
models all that is not trained (BatchNorm's statistics and counters).

**What remembers** is built on them:

    change       weights: the difference from what the receiver has, with error feedback at the sender
    cached       activations: the difference from the last one of the same example

Who keeps what, from round to round:

    client       what coding has lost of its updates; the last activations of its examples as the S-server decoded them
    F-server     what coding has lost of the averaged weights; the weights that it holds are those that clients decoded
    S-server     the last activations of clients' examples; the auxiliaries that it holds are as clients decoded them

A client's is in its state (`codec/...`), the servers' in theirs, and so in every checkpoint. A client that fails in a
round goes back to its state before it; the S-server forgets what it has cached of it in that round, and the F-server
sends it the whole weights, as to everyone who has missed a version.

**Noise** comes from (seed, what travels, client, round, step): every engine draws the same.
"""

from fsl_sage.wire.codecs.arrays import ArrayCodec, CodecError, Noise
from fsl_sage.wire.codecs.chosen import Codecs

__all__ = ["ArrayCodec", "CodecError", "Codecs", "Noise"]
