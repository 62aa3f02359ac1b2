"""The arguments of every command, as --help explains them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fsl_sage.config import Config
from fsl_sage.report.write import ReportOptions
from fsl_sage.text.samples import SampleOptions

Flat = tyro.conf.arg(name="")


@dataclass(frozen=True)
class RunArguments:
    """Train, and write a run directory."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class CostArguments:
    """Print the bytes of a round by kind and direction for every algorithm, without training."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    json: bool = False
    """Print one JSON object keyed by algorithm."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class CutsArguments:
    """Where to cut the model: every cut with its sizes, bytes, FLOPs and memory, and a recommendation."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    client_memory: str | None = None
    """The memory that a client has for training, such as 500MB or 2GiB."""
    uplink: str | None = None
    """The bytes that a client may send in a round, such as 20MB."""
    client_flops: str | None = None
    """The floating-point operations that a client can spend on a step, such as 8e9 or 8G."""
    figure: Path | None = None
    """Also draw the table, into this PNG file."""
    json: bool = False
    """Print one JSON object."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class CompareArguments:
    """Run every combination of algorithms, seeds and settings, and write a report; the same command resumes."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override; its table [compare] may hold the grid."""
    preset: str | None = None
    """A preset of the package that the options override."""
    algorithms: tuple[str, ...] = ()
    """The algorithms to compare."""
    seeds: tuple[int, ...] = ()
    """The seeds of each."""
    alpha: tuple[str, ...] = ()
    """Dirichlet parameters of the partition, or iid: --alpha iid 1 0.1"""
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """OPTION=a,b,c: run with each value of an option, as in align_every=2,5,10; may be given several times."""
    jobs: int | None = None
    """Runs side by side (by the cores if not given); never changes a number."""
    dry_run: bool = False
    """Print the grid with the bytes of each run, and run nothing."""
    report: Annotated[ReportOptions, Flat] = field(default_factory=ReportOptions)
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class ReportArguments:
    """Write figures, tables and report.html from the run directories under a folder."""

    folder: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a folder with run directories in it."""
    out: Path | None = None
    """Where to write (FOLDER/report if not given)."""
    report: Annotated[ReportOptions, Flat] = field(default_factory=ReportOptions)


@dataclass(frozen=True)
class WatchArguments:
    """Show runs live in the browser: curves, bytes, fidelity, what each worker does, how long it will take.

    The page is on this machine alone and reads the files of the runs; it writes none. Ctrl-C ends it.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A run directory, or a folder with run directories in it; runs that start later appear."""
    port: int = 0
    """The port (0: a free one)."""
    open: bool = False
    """Also open the page in the browser."""


@dataclass(frozen=True)
class TheoryArguments:
    """Show a run that was given --theory N beside the paper's convergence theory."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""
    figure: Path | None = None
    """Where to draw the figure (theory.png in the run's directory if not given)."""
    json: bool = False
    """Print one JSON object, and draw nothing."""


@dataclass(frozen=True)
class ResumeArguments:
    """Resume an interrupted run from its last checkpoint."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""
    workers: int | None = None
    """Clients that train side by side, where it should differ from before; never changes a number."""
    engine: Literal["local", "ray"] | None = None
    """The engine, where it should differ from before; never changes a number."""
    ray_address: str | None = None
    """The Ray cluster, where it should differ from before."""


@dataclass(frozen=True)
class PredictArguments:
    """Classify images by the model of a finished run."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")]
    """Image files, or folders of them; they are scaled to the size of the training images."""
    top: int = 1
    """How many of the most likely classes to show."""
    best: bool = False
    """Use the model of the best round (of a run with --keep best)."""
    json: bool = False
    """Print one JSON object a file."""


@dataclass(frozen=True)
class EvaluateArguments:
    """Test the model of a finished run once more, on its own test set or on another."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    data: str | None = None
    """Another data set, as --data.name names it: its test images, or all of a folder or an .npz that has none."""
    best: bool = False
    """Use the model of the best round (of a run with --keep best)."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class DataArguments:
    """Get a data set or a language model ahead of time, or convert a model's weights to safetensors."""

    action: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="get|convert")]
    """get, or convert"""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """To get: cifar10, cifar100, fashion-mnist, imdb, or a model: smollm2-135m, minilm-l6. To convert: a directory with
    pytorch_model.bin."""
    dir: Path | None = None
    """Where to keep it (else $FSL_SAGE_DATA, else the user's cache directory)."""


@dataclass(frozen=True)
class SamplesArguments:
    """Show what the language model of a finished run writes, beside what people wrote, and how that scores."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""
    options: Annotated[SampleOptions, Flat] = field(default_factory=SampleOptions)


@dataclass(frozen=True)
class InitArguments:
    """Write a Flower app, for sites whose data stay where they are; 'flwr run' starts it."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    examples: tuple[int, ...] | None = None
    """The number of training examples of each site; if not given, the data set's are divided among the sites."""
    sites: Path | None = None
    """Write each site's share of the data set there, to try a federation on one machine."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class ExportArguments:
    """Write those files of a model hf:PATH that one side needs, for a site that is not to have the others."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET.toml]")] = None
    """A TOML file with defaults that the options override."""
    preset: str | None = None
    """A preset of the package that the options override."""
    part: Literal["client", "server"] = "client"
    """What a client of the algorithm holds, or the S-server."""
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class DemoArguments:
    """A federation of three sites on this machine: TLS, authenticated nodes, three rounds, and a comparison."""

    language: bool = False
    """Fine-tune SmolLM2-135M on prompts and completions, at sites whose memory the whole model does not fit."""
    keep: Path | None = None
    """Keep the app, the keys, the logs and the runs there."""
