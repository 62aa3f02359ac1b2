"""The peak memory of a client's process at a site, GPT-2 medium's size, against what it must hold.

    python -m benchmarks.site_memory
    python -m benchmarks.site_memory --alone

A federation on loopback with one site: SuperLink, SuperNode, TLS. The model is at its real size with random weights,
cut after the first of its 24 blocks; the auxiliary is the next three blocks and the decoder; batches of 8 texts. The
site gets its frozen weights in chunks before the first round. Flower starts a process for every message; the peak is
the highest that the kernel has counted for any of those that train, from its start to the reply that has left, with all
buffers of the transfer. It is compared with what such a process has after its imports, plus what a step needs: weights,
gradients, the optimizer's state, and what autograd keeps.

With `--alone` there is one such process, of the first round, without Flower's connections: its message and the frozen
weights are on the disk. That takes a minute, and tells all but the buffers of the connection.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict
from rich.console import Console

from benchmarks.timing import CONSOLE
from fsl_sage.algorithms import resolve
from fsl_sage.config import AlignmentConfig, Config, DataConfig, LoRAConfig, ModelConfig, OptimizerConfig
from fsl_sage.deploy.agreement import at_site, read_agreement
from fsl_sage.deploy.app import PACKAGE, agree, write_app, write_sites
from fsl_sage.deploy.demo import follow
from fsl_sage.deploy.processes import LoopbackFederation
from fsl_sage.deploy.site import Place, Site
from fsl_sage.engines.flower.contents import ABOUT, FOUNDATION, TENSORS, Assignment, as_record
from fsl_sage.engines.flower.foundation import Foundation, as_bytes
from fsl_sage.engines.flower.node_state import NEVER
from fsl_sage.engines.flower.weight_store import WEIGHTS
from fsl_sage.engines.process import peak_memory
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.sites import problem_at_server
from fsl_sage.records.run_directory import RunDirectory

WORDS = [f"w{number}" for number in range(500)]
TOKENS = 95
"""Of every text, two thirds of them to be learnt."""
BOUND = 1.1
APP_CONFIG = Path("app") / PACKAGE / "config.json"

RUN_ID = "0" * 32
"""The id of the run whose first round is played alone."""

IMPORTS = """
import flwr.supernode.runtime.run_clientapp
import fsl_sage.deploy.site, fsl_sage.deploy.client_app
import peft, transformers.models.gpt2.modeling_gpt2
from pathlib import Path
line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
print(int(line.split()[1]) * 1024)
"""


def write_tokenizer(directory: Path) -> Path:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[EOS]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")
    fast.save_pretrained(directory)
    return directory


def write_texts(directory: Path) -> Path:
    """Sixteen texts to learn and two to test on."""
    directory.mkdir()
    draw = random.Random(0)
    for file, count in (("train", 16), ("test", 2)):
        lines = []
        for _ in range(count):
            text = [draw.choice(WORDS) for _ in range(TOKENS)]
            row = {"prompt": " ".join(text[: TOKENS // 3]), "completion": " ".join(text[TOKENS // 3 :])}
            lines.append(json.dumps(row))
        (directory / f"{file}.jsonl").write_text("\n".join(lines))
    return directory


def configured(directory: Path) -> Config:
    return resolve(
        Config(
            clients=1,
            rounds=2,
            batch_size=8,
            workers=1,
            device="cpu",
            options={"upload_every": 2, "align_rounds": (9,)},
            data=DataConfig(
                name=f"jsonl:{write_texts(directory / 'texts')}",
                tokenizer=write_tokenizer(directory / "tokenizer"),
                sequence_length=TOKENS + 1,
            ),
            model=ModelConfig(name="hf:gpt2-medium"),
            lora=LoRAConfig(auxiliary="adapters"),
            optimizer=OptimizerConfig("adamw", lr=2e-4),
            alignment=AlignmentConfig(samples=8),
        )
    )


def write_message(directory: Path, config: Config) -> None:
    """What a site has on its disk when its first round begins, and the round's message."""
    agreement, shares = agree(config, None)
    write_app(directory / "app", config, agreement)
    write_sites(directory / "sites", shares, agreement)
    config, agreement = read_agreement(directory / APP_CONFIG)
    setup = make_setup(config, problem_at_server(config, agreement), agreement.examples)
    foundation, large = Foundation.of(setup)
    (directory / "state" / WEIGHTS).mkdir(parents=True)
    for sha256, tensor in large.items():
        (directory / "state" / WEIGHTS / sha256).write_bytes(as_bytes(tensor))
    held = {part: setup.initial[part] for part in setup.algorithm.holds}
    assignment = Assignment(RUN_ID, 0, 0, NEVER, NEVER, held, {}, foundation=foundation.pack(), measured=True)
    content = assignment.content()
    (directory / "about.json").write_text(json.dumps(dict(content.config_records[ABOUT])))
    for name in (TENSORS, FOUNDATION):
        (directory / name).write_bytes(content.array_records[name]["block"].data)


def train(directory: Path) -> None:
    """Play the round whose message is in the directory; print what the process has taken, as JSON."""
    exec(IMPORTS)
    config, agreement = read_agreement(directory / APP_CONFIG)
    (data,) = (directory / "sites").iterdir()
    place = Place(0, data, directory / "state", tokenizer=directory / "tokenizer")
    site = Site(at_site(config, directory / APP_CONFIG), agreement, place)
    about = ConfigRecord(json.loads((directory / "about.json").read_text()))
    blocks = {name: as_record((directory / name).read_bytes()) for name in (TENSORS, FOUNDATION)}
    report = site.train(Assignment.read(RecordDict({ABOUT: about, **blocks})))
    report.content()
    assert report.footprint is not None
    print(json.dumps({**asdict(report.footprint), "peak": peak_memory()}))


def alone(directory: Path) -> None:
    """One process plays the first round."""
    write_message(directory, configured(directory))
    command = [sys.executable, "-m", "benchmarks.site_memory", "--train", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imports, found = done.stdout.split("\n", 1)
    values = json.loads(found)
    judge(int(imports), values["static_bytes"], values["working_bytes"], values["peak"])


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]))
        return
    if sys.argv[1:] == ["--alone"]:
        with tempfile.TemporaryDirectory() as made:
            alone(Path(made))
        return
    quiet = Console(quiet=True)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        config = configured(directory)
        agreement, shares = agree(config, None)
        write_app(directory / "app", config, agreement)
        (site,) = write_sites(directory / "sites", shares, agreement)
        with LoopbackFederation(directory / "federation") as federation:
            federation.start_superlink()
            federation.register([0])
            federation.start_node(0, site, tokenizer=directory / "tokenizer")
            follow(federation, directory, quiet)
            done = subprocess.run(
                [sys.executable, "-c", IMPORTS], env=federation.environment, capture_output=True, text=True, check=True
            )
            (result,) = (federation.directory / "state").glob("*/client-0/result.json")
            peak = int(json.loads(result.read_text())["peak_memory_bytes"])
        metrics = RunDirectory(directory / "run").metrics()[0]
    judge(int(done.stdout.split()[-1]), metrics["client_static_bytes"], metrics["client_working_bytes"], peak)


def judge(imports: int, static: int, working: int, peak: int) -> None:
    """Print them, and fail where the peak is too much."""
    report(imports, static, working, peak)
    if peak > BOUND * (imports + static + working):
        sys.exit(f"The peak is more than {BOUND} times that.")


def report(imports: int, static: int, working: int, peak: int) -> None:
    for what, count in (
        ("after its imports", imports),
        ("weights, gradients, optimizer", static),
        ("kept for the backward pass", working),
        ("together", imports + static + working),
        ("peak of the client's process", peak),
    ):
        CONSOLE.print(f"{what:32} {count / 1e6:8,.0f} MB", highlight=False)
    CONSOLE.print(f"peak / together                  {peak / (imports + static + working):8.3f}", highlight=False)


if __name__ == "__main__":
    main()
