"""A small grid for tests, and the processes of its runs."""

import os
from pathlib import Path

from fsl_sage.compare.grid import Grid, plan_runs
from fsl_sage.compare.scheduler import prepare
from fsl_sage.config import load_preset
from fsl_sage.records.run_directory import RunDirectory

PRESET = """
clients = 3
rounds = 2
batch_size = 16
align_every = 1
device = "cpu"
[data]
train_images = 150
test_images = 100
[model]
name = "small-cnn"
[alignment]
steps = 3
[compare]
algorithms = ["fsl-sage", "cse-fsl"]
seeds = [1, 2]
"""
TIMES = ("seconds", "elapsed_seconds")


def grid_of(preset, out, **grid):
    return prepare(plan_runs(load_preset(preset), Grid(**grid)), out)


def processes_of(folder):
    """Processes of runs under a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"fsl_sage.compare.one_run" in words and any(word.startswith(os.fsencode(folder)) for word in words):
            found.append(int(file.parent.name))
    return found


def without_times(directory):
    return [
        {name: value for name, value in line.items() if name not in TIMES} for line in RunDirectory(directory).metrics()
    ]
