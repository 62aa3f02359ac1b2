"""A sweep over an option and over seeds, with its report: python examples/sweep.py"""

from pathlib import Path

from fsl_sage import AlignmentConfig, Config, DataConfig, ModelConfig, compare, report

config = Config(
    algorithm="fsl-sage",
    clients=3,
    rounds=3,
    batch_size=32,
    model=ModelConfig(name="small-cnn"),
    data=DataConfig(train_images=600, test_images=200),
    alignment=AlignmentConfig(steps=30),  # 120 align better and take longer
)

if __name__ == "__main__":
    out = Path("runs/sweep")  # give the same folder again to resume; `fsl-sage watch runs/sweep` shows it live
    comparison = compare(config, seeds=[1, 2], vary={"align_every": [1, 3]}, out=out)
    comparison.raise_failures()
    for name, result in comparison.results.items():
        print(f"{name:40} {result.best_score:.1%} {result.metrics[-1]['bytes_paper']:>12,} bytes")
    print("tables, figures and a page:", report(out).page)
