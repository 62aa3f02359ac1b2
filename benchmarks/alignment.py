"""An alignment of 10 clients with the default options against the `paper` preset's: time, and the fidelity of both."""

import time

from benchmarks.timing import CONSOLE, note
from fsl_sage.config import AlignmentConfig, Config, DataConfig, load_preset
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import Federation
from fsl_sage.experiment.setup import make_setup


def measure(alignment: AlignmentConfig, warm: int = 2) -> tuple[float, float, float]:
    """Rounds without alignment, an alignment, a round with it: seconds, held-out fidelity (cosine) before and after."""
    config = Config(
        clients=10,
        rounds=100,
        batch_size=64,
        options={"align_every": 1000},
        device="cpu",
        data=DataConfig(train_images=5000, test_images=100),
        alignment=alignment,
    )
    setup = make_setup(config)
    federation = Federation(setup, LocalEngine(setup))
    for t in range(1, 1 + warm):
        federation.play_round(t, list(range(10)))
    before = federation.engine.server.fidelity()
    start = time.perf_counter()
    federation.engine.server.end_of_round(0)  # round 0 is a multiple of every interval
    seconds = time.perf_counter() - start
    # On uploads that the alignment has not seen; so the server has taken the steps of a round since.
    played = federation.play_round(1 + warm, list(range(10)))
    federation.engine.close()
    assert before is not None
    return seconds, before.cosine, played["fidelity_cosine"]


def main(warm: int = 2) -> None:
    CONSOLE.print("\n[bold]Aligning 10 clients[/] (ResNet-18, batch 64, all cores)")
    results = {"default": measure(Config().alignment, warm), "paper": measure(load_preset("paper").alignment, warm)}
    for name, (seconds, before, after) in results.items():
        CONSOLE.print(f"  {name:<8} {seconds:7.1f} s   cosine {before:.2f} → {after:.2f}")
    ratio = results["paper"][0] / results["default"][0]
    CONSOLE.print(f"  time of paper / default: {ratio:.1f}")
    note("an alignment as in the authors' code over the default", ratio)


if __name__ == "__main__":
    main()
