"""The configuration of a run: frozen dataclasses. A field's docstring is its help text on the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsl_sage.config.codec import CodecConfig
from fsl_sage.config.own_options import GivenOptions
from fsl_sage.config.ranges import ABOVE_ZERO, ALPHA, BELOW_ONE, FROM_ZERO, RATE, WHOLE, Range, check_ranges
from fsl_sage.config.values import named_fields, settle
from fsl_sage.errors import InputError
from fsl_sage.own_modules import is_own


@named_fields
@dataclass(frozen=True)
class DataConfig:
    """What the clients learn from, and how it is divided among them."""

    name: str = "cifar10-mini"
    """cifar10-mini (in the package), cifar10, cifar100, fashion-mnist; imdb or e2e, texts; files of your own:
    folder:PATH, npz:PATH, jsonl:PATH, datasets:PATH; or MODULE:FACTORY, a problem of your own."""
    dir: Path | None = None
    """Where data sets are kept (else $FSL_SAGE_DATA, else the user's cache directory)."""
    partition: Literal["iid", "dirichlet", "shards", "restaurant", "given"] = "iid"
    """How the training examples are divided among the clients. restaurant (e2e): all texts about a restaurant go to one
    client. given: by the folders clients/0, clients/1, … of folder:PATH, for which it is the default."""
    alpha: float = 1.0
    """Dirichlet parameter, 0.01 to 1e4: the smaller, the more the clients' classes differ."""
    shards_per_client: int = 2
    """With `shards`: how many label-sorted shards each client gets."""
    augment: bool = True
    """Random flips and crops of the training images."""
    augmentation: str | None = None
    """MODULE:FUNCTION, an augmentation of your own in the place of flips and crops: from a batch of images
    [B, C, H, W] and a torch.Generator to as many images."""
    image_size: int | None = None
    """folder: and datasets: only: pictures are scaled and cropped to so many pixels a side; needed where their sizes
    differ."""
    class_weights: str | None = None
    """Weights of the classes in the training loss: balanced, or a number for each with commas between them."""
    train_images: int | None = None
    """Use only this many training images (texts), balanced over the classes (restaurants)."""
    test_images: int | None = None
    """Use only this many test images (texts), balanced over the classes (restaurants)."""
    test_fraction: float = 0.2
    """The part of a set without test examples that is kept for testing."""
    tokenizer: Path | None = None
    """Text only: the directory of a tokenizer of transformers (that of hf:PATH if not given)."""
    sequence_length: int = 512
    """Text only: the greatest number of tokens of a text."""
    long_texts: Literal["cut", "refuse"] | None = None
    """Text only: longer texts are cut off, or refused; if not given, those of e2e and imdb are cut off."""

    def __post_init__(self) -> None:
        settle(self, DataConfig, "data.")


@named_fields
@dataclass(frozen=True)
class ModelConfig:
    """The model, where it is cut, and the auxiliary."""

    name: str = "resnet18"
    """resnet18, small-cnn, hf:ARCHITECTURE or hf:PATH (transformers), or MODULE:FACTORY, your own. On texts with labels
    an hf: model is a sequence classifier; on other texts it is a causal language model, which is trained by LoRA.
    hf:PATH brings its weights and its tokenizer."""
    frozen: tuple[str, ...] = ()
    """Modules or weights that are not trained, by name, such as bert.embeddings; they travel once, before round 0."""
    cut: str | None = None
    """The last module at the client; the model's usual cut if not given. FIRST,SECOND: a U-shape, whose part after
    SECOND, the head, is at the client too, so that labels stay there."""
    auxiliary: str | None = None
    """The auxiliary, made from the server part: blocks:N, linear, half, full, a share of its bytes such as 5%, or a
    number of bytes. If not given, blocks:1; for a language model blocks:3. Or ridge, a linear estimator of the cut
    gradient that is fitted in closed form (fsl-sage only); ridge:3072 has as many random features."""
    batch_norm: Literal["average", "local", "group"] = "average"
    """BatchNorm statistics: averaged with the weights, kept local at each client, or GroupNorm in its place."""
    recalibrate: bool = False
    """Also evaluate with the S-server's BatchNorm statistics estimated anew from stored uploads."""

    def __post_init__(self) -> None:
        settle(self, ModelConfig, "model.")

    @property
    def cuts(self) -> tuple[str, ...]:
        """The cuts that are given: none, one, or the two of a U-shape."""
        return tuple(name.strip() for name in self.cut.split(",")) if self.cut else ()


@named_fields
@dataclass(frozen=True)
class LoRAConfig:
    """What is trained of a language model: low-rank adapters; the defaults are those of the LoRA paper for E2E."""

    rank: int = 4
    """The rank r of the adapters."""
    alpha: float = 32.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = 0.1
    """Dropout before the adapters. Above 0, the clients of one process train one after the other."""
    targets: tuple[str, ...] = ()
    """The layers that get adapters, by the last part of their names; if not given, the attention's queries and values
    (GPT-2: c_attn)."""
    auxiliary: Literal["adapters", "head", "all"] = "head"
    """What is trained, and so travels, of an auxiliary: its adapters, these and its head (the last norm and the
    decoder), or all of it."""

    def __post_init__(self) -> None:
        settle(self, LoRAConfig, "lora.")


@named_fields
@dataclass(frozen=True)
class OptimizerConfig:
    """How clients and S-server take their steps; by default adamw for texts, with a warm-up, then linearly to 0."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    """The optimizer of the clients and of the S-server."""
    lr: float = 1e-3
    """Learning rate of the clients, and of the S-server unless server_lr is given."""
    server_lr: float | None = None
    """Learning rate of the S-server, where it differs."""
    weight_decay: float = 1e-4
    """Weight decay."""
    auxiliary_weight_decay: float | None = None
    """Weight decay of an auxiliary that clients train, where it differs."""
    momentum: float = 0.9
    """Momentum; for sgd only."""
    schedule: Literal["constant", "cosine", "linear", "step", "exponential"] = "constant"
    """Learning rate over the run's local steps, by torch's own schedulers."""
    warmup: float = 0.0
    """The part of the run, 0 to 1, in which the learning rate rises linearly to its value."""
    decay: float = 0.1
    """Factor of the learning rate: at each third of the run (step), or by the end of it (linear, exponential)."""
    label_smoothing: float | None = None
    """Label smoothing of the training loss; if not given, 0.1 for language models, else none."""

    def __post_init__(self) -> None:
        settle(self, OptimizerConfig, "optimizer.")


@named_fields
@dataclass(frozen=True)
class AlignmentConfig:
    """How the S-server aligns the auxiliaries (fsl-sage)."""

    loss: Literal["squared", "cosine"] = "squared"
    """What an alignment lowers: the squared distance of estimated and true cut gradients, or 1 - their cosine, by
    sample (for texts by token) and weighted by the length of the true one; then one number scales the estimates."""
    samples: int = 512
    """How many of a client's newest uploaded samples the alignment dataset keeps."""
    total_samples: int = 65536
    """Besides that, how many samples the alignment datasets of all clients keep together; the oldest make room,
    whosever they are."""
    tokens: int | None = None
    """Text only: instead, how many tokens the alignment datasets of all clients keep together, padding included; the
    oldest texts make room, whosever they are."""
    steps: int = 120
    """Optimizer steps an alignment takes; not used if passes is given."""
    passes: int | None = None
    """Passes over the alignment dataset instead of a number of steps."""
    max_passes: int | None = None
    """At most so many passes over the alignment dataset, where that is fewer steps; for language models 8 if
    not given."""
    max_tokens: int | None = None
    """Text only: an alignment ends before the step that would make it more tokens than these, padding included; a
    budget of time that is the same on every machine."""
    batch_size: int = 128
    """Samples a step; 0 takes the batches as they were uploaded."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """The optimizer of the alignment; without weight decay."""
    lr: float = 3e-3
    """The learning rate of the alignment."""
    optimizer_state: Literal["new", "kept"] = "new"
    """Whether each alignment starts with a new optimizer state, or goes on with that of the one before."""
    clip: float | None = None
    """Clip the norm of an alignment step's gradient: the first ones of a far-off auxiliary can be huge."""
    start: Literal["previous", "server"] = "server"
    """Start from the previous auxiliary, or from the server's own blocks where names and shapes agree."""
    scope: Literal["client", "pooled"] = "pooled"
    """One auxiliary for each client, or one for all from their pooled uploads."""
    ridge: float = 0.1
    """With --model.auxiliary ridge: its strength, by which the squares of the features are made larger."""
    forgetting: float = 0.02
    """With --model.auxiliary ridge: the part of its sums that is forgotten with every upload, from 0 to below 1."""

    def __post_init__(self) -> None:
        settle(self, AlignmentConfig, "alignment.")


@named_fields
@dataclass(frozen=True)
class AveragingConfig:
    """How the F-server makes new weights of the clients', and what keeps the clients together; for every algorithm."""

    rule: Literal["mean", "clipped", "trimmed-mean", "median"] = "mean"
    """The weighted mean; or a rule that bounds what one poisoned client can do: changes clipped to the median of their
    norms, the mean of each number without its largest and smallest tenth, or its median. The last two count all
    clients the same. SplitFed-MS averages its server-side models by it too."""
    weighting: Literal["examples", "uniform"] = "examples"
    """Averages weighted by the clients' numbers of examples, or uniform."""
    optimizer: Literal["sgd", "adam", "yogi", "adagrad"] | None = None
    """FedOpt: the F-server's step from its weights x along (average - x); sgd if not given, which by the defaults below
    is the average itself. Buffers are averaged."""
    lr: float | None = None
    """Learning rate of that step; if not given, 1 for sgd, 0.01 for the others."""
    momentum: float = 0.0
    """Momentum of that step; for sgd only."""
    beta1: float = 0.9
    """Decay of the mean of the changes; for adam, yogi and adagrad."""
    beta2: float = 0.99
    """Decay of the mean of their squares; for adam and yogi."""
    tau: float = 1e-3
    """Added to the root of that mean; for adam, yogi and adagrad."""
    proximal: float | None = None
    """FedProx: mu (x - x_received) is added to the clients' gradients; 0 if not given, in fedprox 0.01."""
    control_variates: bool = False
    """SCAFFOLD: the clients' steps are corrected by c - c_i; needs --optimizer.name sgd. In scaffold always."""

    def __post_init__(self) -> None:
        settle(self, AveragingConfig, "averaging.")

    @property
    def rate(self) -> float:
        """The learning rate of the F-server's step."""
        if self.lr is not None:
            return self.lr
        return 1.0 if self.optimizer in (None, "sgd") else 0.01

    @property
    def takes_the_average(self) -> bool:
        """Whether the F-server's step ends at the average itself."""
        return self.optimizer in (None, "sgd") and self.rate == 1 and self.momentum == 0


@named_fields
@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    algorithm: str = "fsl-sage"
    """The name of an algorithm (fsl_sage.ALGORITHMS has them all), or MODULE:CLASS, your own."""
    clients: int = 5
    """The number of clients m."""
    rounds: int = 10
    """The number of rounds T; the run ends earlier if a budget, target or time limit is met."""
    batch_size: int = 32
    """Images in a local step, or texts (by default 8 for language models, 16 for classifiers)."""
    local_epochs: int = 1
    """Epochs a client takes over its own data in a round."""
    local_steps: int | None = None
    """A fixed number K of local steps in a round instead of epochs."""
    cohort: float = 1.0
    """The fraction of the clients that takes part in a round."""
    client_optimizer: Literal["keep", "reset", "average"] = "keep"
    """keep: a client's optimizer remembers momentum and Adam's moments from round to round. reset: it is a new one in
    every round, and nothing is stored; so is that of a server-side model of a client's own (splitfed-ms, local-loss).
    average: the moments travel with the weights and are averaged like them."""
    order: Literal["interleaved", "blocked", "arrival"] = "interleaved"
    """Order in which the S-server takes uploads: step by step, client after client, or as they come (ray)."""
    seed: int = 0
    """The seed from which every random number is derived."""

    budget_gib: float | None = None
    """Stop after the round in which the communication (by the paper's convention) reaches this many GiB."""
    target_accuracy: float | None = None
    """Stop after the round whose headline score is this good: for images and texts a test accuracy, 0 to 1."""
    max_seconds: float | None = None
    """Stop after the round in which this wall time is over."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["float32", "bf16", "float64"] = "float32"
    """bf16: passes under bfloat16 autocast, faster where the CPU has products of such numbers; what crosses the cut is
    bfloat16 then. float64: weights and images in double precision."""
    threads: int = 1
    """torch threads of every worker, of the S-server and of the evaluation; part of the result's bits."""
    workers: int | None = None
    """Clients that train side by side (if not given: as many as there are cores, or GPUs); never changes a number."""
    clients_at_once: int = 1
    """Clients that a worker trains as one stack of weights: for GPUs, which small batches leave idle; on a CPU seldom
    faster. Not for texts; on the local engine, with clients that do not wait; part of the result's last bits."""
    client_memory_mib: int = 1024
    """MiB of clients' states that may stay in memory between rounds; beyond that each is a file below the run's
    directory, and only clients that train are in memory. It changes no number."""
    on_client_failure: Literal["stop", "drop"] = "stop"
    """A client whose code fails stops the run, or is dropped from the round and listed in its metrics."""
    engine: Literal["local", "ray", "flower"] = "local"
    """What carries the messages: threads of this process, Ray actors (extra `ray`), or Flower (`fsl-sage deploy`)."""
    ray_address: str | None = None
    """The cluster to run on: HOST:PORT, or auto for the one of this machine; without a cluster if not given."""
    ray_num_gpus: float | None = None
    """GPUs of each worker and of the S-server, a fraction to share one; an equal share of all if not given."""
    ray_spill_mib: int = 1024
    """MiB of uploads that may wait in memory for their turn at the S-server; the rest waits on disk."""

    theory: int | None = None
    """Every N rounds also measure the quantities of the paper's theory; `fsl-sage theory RUN` shows them."""

    parameter_fidelity: int | None = None
    """Every N rounds also measure how well the auxiliaries estimate the gradient of the client part's weights, by
    examples that are in no batch of the estimate; not on Flower, for it needs the clients' data."""

    out: Path | None = None
    """The run's directory (runs/… with the time if not given)."""
    checkpoint_every: int | None = None
    """Write a checkpoint every N rounds; if not given, after each round, but short ones go without where checkpoints
    would take more than a twentieth of the time."""
    keep_checkpoint: bool = False
    """Keep the last checkpoint, with the clients' states, when the run is finished."""
    keep: Literal["last", "best"] = "last"
    """best: also keep the model of the round with the best headline score, as best.safetensors."""
    track: tuple[Literal["tensorboard", "mlflow"], ...] = ()
    """Send the metrics to these trackers too (extra `track`)."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    averaging: AveragingConfig = field(default_factory=AveragingConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)

    options: Any = None
    """The algorithm's own options: its dataclass, or values by name; its defaults if not given."""

    def __post_init__(self) -> None:
        settle(self, Config)
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", GivenOptions(dict(self.options)))
        check_ranges(self, _RANGES)
        if len(self.model.cuts) > 2 or not all(self.model.cuts):
            raise InputError(
                f"--model.cut {self.model.cut} is not possible: give one name, or FIRST,SECOND for a U-shape."
            )
        if self.alignment.batch_size == 1:
            raise InputError("--alignment.batch-size 1 is not possible: BatchNorm needs two; 0 is as uploaded.")
        if self.optimizer.schedule == "exponential" and self.optimizer.decay == 0:
            raise InputError("--optimizer.decay 0 is not possible with an exponential schedule: give a number above 0.")
        if self.order == "arrival" and self.engine == "local":
            raise InputError("--order arrival needs clients that really run in parallel: give --engine ray too.")


def require_config(given: object, of: str) -> None:
    """Refuse what is not a Config, where a person may have given its values or a file's name.

    Args:
        given: What was given.
        of: The function that it was given to.
    """
    if not isinstance(given, Config):
        raise InputError(
            f"{of} takes a Config, not a {type(given).__name__}: write {of}(Config(rounds=3, …)), or "
            f"{of}(load_preset(FILE)) for what stands in a TOML file."
        )


DEFAULTS: dict[str, Callable[[str], Config]] = {}
"""By the name of a data set, or by the kind of it (`folder:`), what makes its defaults where they differ. The room that
knows the data enters it."""


def default_config(data: str = DataConfig.name) -> Config:
    """The default configuration for a data set, given as `--data.name`. Some, such as E2E's texts, have their own."""
    make = DEFAULTS.get(data) or DEFAULTS.get(data.partition(":")[0] + ":")
    return make(data) if make else Config()


def brings_modules(config: Config) -> bool:
    """Whether a run imports modules of the user's own; a problem that was given as an object is named MODULE.CLASS."""
    data = config.data.name
    names = (config.algorithm, data, config.data.augmentation, config.model.name)
    return any(is_own(name) for name in names) or ("." in data and ":" not in data)


_RANGES: dict[str, Range] = {
    "clients": WHOLE,
    "rounds": WHOLE,
    "batch_size": ("a whole number from 2 up (BatchNorm needs two)", 2, 2**62),
    "local_epochs": WHOLE,
    "local_steps": WHOLE,
    "cohort": ("a fraction above 0, at most 1", ABOVE_ZERO, 1),
    "seed": ("a whole number from 0 up", 0, 2**62),
    "budget_gib": RATE,
    "target_accuracy": RATE,
    "max_seconds": RATE,
    "threads": WHOLE,
    "workers": WHOLE,
    "clients_at_once": WHOLE,
    "ray_num_gpus": FROM_ZERO,
    "client_memory_mib": ("a whole number from 0 up", 0, 2**42),
    "ray_spill_mib": ("a whole number from 0 up", 0, 2**42),
    "checkpoint_every": WHOLE,
    "theory": WHOLE,
    "parameter_fidelity": WHOLE,
    "data.alpha": ALPHA,
    "data.shards_per_client": WHOLE,
    "data.train_images": WHOLE,
    "data.test_images": WHOLE,
    "data.test_fraction": ("a fraction between 0 and 1", 1e-6, 1 - 1e-6),
    "data.image_size": WHOLE,
    "data.sequence_length": ("a whole number from 4 up", 4, 2**31 - 1),
    "lora.rank": WHOLE,
    "lora.alpha": RATE,
    "lora.dropout": ("a fraction from 0 to below 1", 0, 1 - 1e-9),
    "optimizer.lr": RATE,
    "optimizer.server_lr": RATE,
    "optimizer.weight_decay": FROM_ZERO,
    "optimizer.auxiliary_weight_decay": FROM_ZERO,
    "optimizer.momentum": BELOW_ONE,
    "optimizer.warmup": ("a fraction from 0 to 1", 0, 1),
    "optimizer.decay": ("a fraction from 0 to 1", 0, 1),
    "optimizer.label_smoothing": ("a fraction from 0 to below 1", 0, 1 - 1e-9),
    "alignment.samples": ("a whole number from 2 up", 2, 2**62),
    "alignment.total_samples": ("a whole number from 2 up", 2, 2**62),
    "alignment.steps": WHOLE,
    "alignment.passes": WHOLE,
    "alignment.max_passes": WHOLE,
    "alignment.batch_size": ("0, or a whole number from 2 up (BatchNorm needs two)", 0, 2**62),
    "alignment.tokens": WHOLE,
    "alignment.max_tokens": WHOLE,
    "alignment.lr": RATE,
    "alignment.ridge": RATE,
    "alignment.forgetting": BELOW_ONE,
    "alignment.clip": RATE,
    "averaging.lr": RATE,
    "averaging.momentum": BELOW_ONE,
    "averaging.beta1": BELOW_ONE,
    "averaging.beta2": BELOW_ONE,
    "averaging.tau": RATE,
    "averaging.proximal": FROM_ZERO,
}

# These fields do not change what a run computes: they may differ between a run and the one that resumes it.
NO_PART_OF_THE_RESULT = (
    "out",
    "workers",
    "client_memory_mib",
    "on_client_failure",
    "engine",
    "ray_address",
    "ray_num_gpus",
    "ray_spill_mib",
    "checkpoint_every",
    "keep_checkpoint",
    "keep",
    "track",
)
