"""`make bench`: all ratios, one after the other, and a table of them with their goals at the end."""

from benchmarks import (
    alignment,
    bf16,
    codecs,
    cut_memory,
    ray_engine,
    reference_work,
    resnet_step,
    rounds,
    split_overhead,
    startup,
)
from benchmarks.timing import summary

if __name__ == "__main__":
    startup.main()
    bf16.main()
    resnet_step.main()
    split_overhead.main()
    cut_memory.main()
    reference_work.main()
    rounds.main()
    rounds.fidelity()
    rounds.two_workers()
    alignment.main()
    codecs.main()
    ray_engine.main()
    summary()
