"""Makes the recorded experiments that two cores can make: python experiments/all.py [STUDY ...] [--jobs N].

A study is a folder of curves. A curve is one `fsl-sage compare` into runs/STUDY/CURVE. Whatever stops it, the same
command continues where it was: finished runs stay, interrupted ones resume from their checkpoints. Runs that are
recorded in experiments/results count as finished. After every curve the study is reported and collected into
experiments/results, so that finished runs can be committed as they come.

It runs at the lowest priority, so that other work on the machine goes first.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs"
RESULTS = HERE / "results"

IMAGES = "cifar10-10k-images"
FSL_SAGE = ("--algorithms", "fsl-sage")
ONE = (*FSL_SAGE, "--seeds", "1", "--alpha", "iid")
TRIAL = (*FSL_SAGE, "--seeds", "1", "--alpha", "iid", "0.1")
SMALL = ("--codec.preset", "small")
DRIFT = ("--align-when", "drift", "--align-below", "0.5", "--align-every", "2")
HERON = ("--model.auxiliary", "linear", "--optimizer.lr", "1e-4", "--optimizer.server-lr", "1e-3")
BOTH = ("--alpha", "iid", "0.1")
TRUE_GRADIENTS = "experiments.controls:TrueGradients"  # what a perfect auxiliary would give
FROZEN = ("--seeds", "1", "--optimizer.lr", "1e-30", "--optimizer.server-lr", "1e-3")  # clients that stand still
DEEPER = ("--model.cut", "model.layers.9")

# study -> curve -> preset of experiments/ and the options that it is run with. A study of one curve has it as "".
STUDIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "family": {
        "adam": ("cpu/family",),
        "joint": ("cpu/family", "--algorithms", "splitfed-ss", "--joint-step"),
        "heron": ("cpu/family", "--algorithms", "heron-sfl", *HERON),
    },
    "family-sgd": {"": ("cpu/family-sgd",)},
    "niid-bench": {"": ("cpu/niid-bench", "--rounds", "24")},  # of 50: two hours of two cores
    "cifar10-10k-choices": {
        "base": (f"cpu/{IMAGES}", *TRIAL),
        "start": (f"cpu/{IMAGES}", *TRIAL, "--align-at", "start"),
        "local": (f"cpu/{IMAGES}", *TRIAL, "--local-auxiliary"),
        "warm": (f"cpu/{IMAGES}", *TRIAL, "--warm-start"),
        "rounds": (f"cpu/{IMAGES}", *TRIAL, "--align-rounds", "0", "1", "2", "4", "8"),
        "samples": (f"cpu/{IMAGES}", *TRIAL, "--alignment.samples", "1024"),
        "upload2": (f"cpu/{IMAGES}", *TRIAL, "--upload-every", "2"),
        "upload1": (f"cpu/{IMAGES}", *TRIAL, "--upload-every", "1"),
    },
    "cifar10-10k-estimators": {
        "ridge": (f"cpu/{IMAGES}", *ONE, "--model.auxiliary", "ridge", "--align-every", "1"),
        "cosine": (f"cpu/{IMAGES}", *ONE, "--alignment.loss", "cosine"),
        "linear": (f"cpu/{IMAGES}", *ONE, "--model.auxiliary", "linear"),
    },
    IMAGES: {"": (f"cpu/{IMAGES}",)},
    "cifar10-10k-true-gradients": {"": (f"cpu/{IMAGES}", "--algorithms", TRUE_GRADIENTS, "--seeds", "1", *BOTH)},
    "cifar10-10k-bf16": {"": (f"cpu/{IMAGES}", *FSL_SAGE, "--alpha", "iid", "--precision", "bf16")},
    "fewer-bytes": {
        "plain": ("cpu/fewer-bytes", *FSL_SAGE, "--seeds", "1", "2", "3"),
        "small-every-step": ("cpu/fewer-bytes", *FSL_SAGE, "--seeds", "1", "2", "3", *SMALL, "--upload-every", "1"),
        "small": ("cpu/fewer-bytes", *FSL_SAGE, *SMALL),
        "others-small": ("cpu/fewer-bytes", "--algorithms", "cse-fsl", "splitfed-ss", *SMALL),
        "balanced": ("cpu/fewer-bytes", *FSL_SAGE, "--codec.preset", "balanced"),
        "small-drift": ("cpu/fewer-bytes", *FSL_SAGE, *SMALL, *DRIFT),
        "small-every-second": ("cpu/fewer-bytes", *FSL_SAGE, *SMALL, "--upload-every", "2"),
        "drift": ("cpu/fewer-bytes", *FSL_SAGE, *DRIFT),
        "others": ("cpu/fewer-bytes", "--algorithms", "cse-fsl", "splitfed-ss"),
    },
    "cifar10-10k-alignment-interval": {"": ("cpu/cifar10-10k-alignment-interval", *BOTH)},
    "cifar10-10k-auxiliary-size": {
        "usual": (f"cpu/{IMAGES}", "--algorithms", "fsl-sage", "cse-fsl", "--seeds", "1", *BOTH),
        "sizes": ("cpu/cifar10-10k-auxiliary-size", *BOTH),
    },
    "cifar100-9999-test-images": {"": ("cpu/cifar100-9999-test-images",)},
    "imdb-minilm-estimators": {
        "cosine": ("cpu/imdb-minilm", *FSL_SAGE, "--alignment.loss", "cosine"),
        "ridge": ("cpu/imdb-minilm", *FSL_SAGE, "--model.auxiliary", "ridge", "--align-every", "1"),
    },
    "smollm2_e2e": {
        "blocks": ("cpu/smollm2_e2e", "--alignment.max-passes", "None"),
        "ridge": ("cpu/smollm2_e2e_ridge", "--parameter-fidelity", "3"),
        "control": ("cpu/smollm2_e2e_ridge", *FROZEN),
        "cse-fsl": ("cpu/smollm2_e2e", "--algorithms", "cse-fsl", "--seeds", "2"),
    },
    "smollm2_e2e-block-10": {
        "ridge": ("cpu/smollm2_e2e_ridge", *DEEPER),
        "control": ("cpu/smollm2_e2e_ridge", *FROZEN, *DEEPER),
        "splitfed-ss": ("cpu/smollm2_e2e", "--algorithms", "splitfed-ss", *DEEPER),
        "cse-fsl": ("cpu/smollm2_e2e", "--algorithms", "cse-fsl", "--seeds", "1", "2", *DEEPER),
    },
    "paper-two-cores": {
        "estimated": ("paper/cifar10-two-cores",),
        "exact": ("paper/cifar10-two-cores", "--algorithms", "splitfed-ss", "fedavg", "--rounds", "50"),
        "true": ("paper/cifar10-two-cores", "--algorithms", TRUE_GRADIENTS, "--rounds", "40"),
        "skewed": ("paper/cifar10-two-cores", "--alpha", "0.1"),
    },
}

# Runs that two studies share, by their folders in results: whoever comes second takes what the first has recorded.
_PARTITIONS = ("iid", "alpha0.1")
_FSL_SAGE = [f"fsl-sage_{partition}_seed{seed}" for partition in _PARTITIONS for seed in (1, 2, 3)]
_ONE_SEED = [f"{name}_{of}_seed1" for name in ("fsl-sage", "cse-fsl", "splitfed-ss") for of in _PARTITIONS]
SHARED = [
    *((f"cifar10-10k-choices/base/{run}", f"{IMAGES}/{run}") for run in _ONE_SEED[:2]),
    *((f"{IMAGES}/{run}", f"fewer-bytes/plain/{run}") for run in _FSL_SAGE),
    *((f"{IMAGES}/{run}", f"fewer-bytes/others/{run}") for run in _ONE_SEED[2:]),
    *((f"{IMAGES}/{run}", f"cifar10-10k-auxiliary-size/usual/{run}") for run in _ONE_SEED[:4]),
    *((f"{IMAGES}/{run}", f"cifar10-10k-alignment-interval/{run}_align-every5") for run in _ONE_SEED[:2]),
    *((f"{IMAGES}/{run}", f"cifar10-10k-alignment-interval/{run}") for run in _ONE_SEED[2:4]),
    (
        "cifar10-10k-estimators/linear/fsl-sage_iid_seed1",
        "cifar10-10k-auxiliary-size/sizes/fsl-sage_iid_seed1_model.auxiliary-linear",
    ),
]


def make(study: str, jobs: int | None) -> bool:
    """Make the curves of a study, one after the other; returns whether all of its runs have finished."""
    adopt(study)
    done = True
    for curve in STUDIES[study]:
        preset, *options = STUDIES[study][curve]
        side_by_side = [] if jobs is None else ["--jobs", str(jobs)]
        out = ["--out", str(RUNS / study / curve)]
        done = _call("compare", str(HERE / f"{preset}.toml"), *options, *side_by_side, *out) and done
        _call("report", str(RUNS / study))
        subprocess.run([sys.executable, HERE / "collect.py", RUNS / study, RESULTS / study], check=True)
    return done


def adopt(study: str) -> None:
    """Copy recorded runs of a study, and those that it shares, to where `compare` takes them as finished."""
    own = [(file.parent, RUNS / file.parent.relative_to(RESULTS)) for file in (RESULTS / study).rglob("result.json")]
    either_way = SHARED + [(other, one) for one, other in SHARED]
    shared = [(RESULTS / one, RUNS / other) for one, other in either_way if other.startswith(f"{study}/")]
    for recorded, run in own + shared:
        if (recorded / "result.json").exists() and not run.exists():
            shutil.copytree(recorded, run)


def _call(*arguments: str) -> bool:
    """Run a command of fsl-sage and show it; returns whether it succeeded."""
    print("$ fsl-sage", *arguments, flush=True)
    return subprocess.run([sys.executable, "-m", "fsl_sage", *arguments]).returncode == 0


def main() -> None:
    """Make the studies that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all if none is given")
    parser.add_argument("--jobs", type=int, help="runs side by side; by the cores if not given")
    asked = parser.parse_args()
    if unknown := [study for study in asked.studies if study not in STUDIES]:
        parser.error(f"{', '.join(unknown)} is not a study: give {', '.join(STUDIES)}")
    os.nice(19)
    unfinished = [study for study in asked.studies or STUDIES if not make(study, asked.jobs)]
    sys.exit(f"Not finished: {', '.join(unfinished)}" if unfinished else 0)


if __name__ == "__main__":
    main()
