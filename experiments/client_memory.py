"""The memory that a client's training takes: python experiments/client_memory.py PRESET.toml [DIR]

For each algorithm of the preset a process of its own holds the parts that a client has, and nothing else, and takes
three steps with Adam on batches of the preset's size. Printed is the growth of its peak memory (Linux). With DIR the
figures are written to DIR/client-memory.json.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fsl_sage.algorithms import make_algorithm, resolve
from fsl_sage.compare.grid import load_grid
from fsl_sage.config import load_preset
from fsl_sage.experiment.setup import make_dry_setup
from fsl_sage.problems.make import make_dry_problem
from fsl_sage.roles.work import Chain, boundary

STEPS = 3


def measured(preset: str, algorithm: str) -> int:
    """Bytes by which the peak of this process grows."""
    config = resolve(replace(load_preset(preset), algorithm=algorithm))
    setup, kind = make_dry_setup(config), make_algorithm(config)
    inputs = make_dry_problem(config).largest_example(config.batch_size, "cpu")
    torch.set_num_threads(1)
    before = _memory("VmRSS")
    parts = {part: _filled(setup.modules[part]) for part in kind.holds}
    client, *others = (parts[part] for part in ("client", "server", "auxiliary") if part in parts)
    trained = [weight for part in kind.trained_in(0) for weight in parts[part].parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for _ in range(STEPS):
        z = boundary(client(**inputs) if isinstance(inputs, dict) else client(inputs))
        output = Chain(*others)(*z)
        getattr(output, "logits", output).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _memory("VmHWM") - before


def _filled(module: nn.Module) -> nn.Module:
    """The part with real tensors, whose values do not matter."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0, 0.02) if tensor.is_floating_point() else tensor.zero_()
    return module


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    """Measure every algorithm in a process of its own."""
    preset = sys.argv[1]
    if len(sys.argv) == 4 and sys.argv[2] == "--one":
        print(measured(preset, sys.argv[3]))
        return
    found = {}
    for algorithm in load_grid(preset).algorithms:
        command = [sys.executable, __file__, preset, "--one", algorithm]
        found[algorithm] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{algorithm:<12} {found[algorithm] / 1e6:.0f} MB", flush=True)
    if len(sys.argv) == 3:
        (Path(sys.argv[2]) / "client-memory.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
