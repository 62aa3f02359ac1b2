"""`make bench`: all ratios, one after the other."""

from benchmarks import alignment, codecs, cut_memory, ray_engine, resnet_step, rounds, split_overhead, startup

if __name__ == "__main__":
    startup.main()
    resnet_step.main()
    split_overhead.main()
    cut_memory.main()
    rounds.main()
    rounds.fidelity()
    rounds.two_workers()
    alignment.main()
    codecs.main()
    ray_engine.main()
