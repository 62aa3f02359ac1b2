"""One round of FSL-SAGE with GPT-2 medium at its real size: a step of each of three clients, and an alignment.

    python benchmarks/gpt2_medium_step.py --e2e FOLDER --tokenizer FOLDER

The weights are random, LoRA as in experiments/paper/gpt2-medium-e2e.toml, two texts a step. It prints what the round
took on one thread, and the losses, which start at about ln(50257) = 10.8, that of a model that knows nothing.
"""

import argparse
import tempfile
import time
from pathlib import Path

from fsl_sage import load_preset, run
from fsl_sage.config import from_dict

PRESET = Path(__file__).parents[1] / "experiments" / "paper" / "gpt2-medium-e2e.toml"


def main(e2e: Path, tokenizer: Path) -> None:
    """Build, train a round of one step, align by one step, evaluate two texts."""
    with tempfile.TemporaryDirectory() as directory:
        small = {
            "rounds": 1,
            "batch_size": 2,
            "local_steps": 1,
            "device": "cpu",
            "out": f"{directory}/run",
            "checkpoint_every": 2,
            "data": {"dir": str(e2e), "tokenizer": str(tokenizer), "train_images": 6, "test_images": 2},
            "alignment": {"samples": 2, "passes": 1, "batch_size": 0},
        }
        start = time.perf_counter()
        result = run(from_dict(small, load_preset(PRESET)))
        line = result.metrics[0]
        print(f"GPT-2 medium, three clients, one step each: {line['seconds']:.1f} s for the round with its alignment")
        print(f"and the evaluation; {time.perf_counter() - start:.1f} s with building the model and its parts.")
        print(f"training loss {line['train_loss']:.2f}, auxiliary loss {line['auxiliary_loss']:.2f}, test loss")
        print(
            f"{line['test_loss']:.2f}; cosine of the cut gradients {line['fidelity_cosine']:.2f} before the alignment."
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--e2e", type=Path, required=True, help="the folder with E2E's official files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the folder with GPT-2's tokenizer")
    arguments = parser.parse_args()
    main(arguments.e2e, arguments.tokenizer)
