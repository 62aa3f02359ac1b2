"""`make same-bits BASE=COMMIT`: does the working tree compute the same bits as a commit?

A fixed set of small configurations runs with the sources of both, on this machine. Compared are metrics.jsonl (times
excepted), ledger.csv, the tensors of model.safetensors, and what `fsl-sage cost` prints. Machines differ in their last
bits, so no digests are recorded: both sides always run. The exit code is 1 if anything differs. What an older commit
refuses, because it does not know the algorithm or the option, is not compared, and is named.
"""

import argparse
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
AT_ONCE = 2
TIMES = ("seconds", "elapsed_seconds")

# What was renamed, newest first. The configurations below are spelled as the working tree spells them. A tree that
# refuses a configuration is given the older spellings, one renaming after the other.
RENAMED_OPTIONS: list[tuple[str, str]] = []
"""(new, old): dotted paths such as `alignment.start`."""
RENAMED_METRICS: list[tuple[str, str]] = []
"""(new, old): keys of metrics.jsonl."""

# The configurations

TINY: dict[str, Any] = {
    "clients": 3,
    "rounds": 3,
    "batch_size": 16,
    "upload_every": 2,
    "align_every": 2,
    "workers": 2,
    "device": "cpu",
    "data": {"train_images": 150, "test_images": 100},
    "model": {"name": "small-cnn"},
    "alignment": {"samples": 48, "steps": 4, "batch_size": 16},
}
U = {"cut": "block1,block3"}
SKEWED = {"partition": "dirichlet", "alpha": 0.5}


class Case(NamedTuple):
    """One configuration and how it is run."""

    changes: dict[str, Any]
    how: str = "run"
    """run, cost, resume (killed after the first checkpoint, then resumed) or flower (the in-process grid of tests)."""
    own: str = ""
    """The data, where they are not cifar10-mini: `e2e`, texts in its form and a tiny GPT-2; `module`, a problem of a
    module; or a kind of tests/own_data.py."""


CASES: dict[str, Case] = {
    "fsl-sage": Case({"algorithm": "fsl-sage"}),
    "lazy-fsl-sage": Case({"algorithm": "lazy-fsl-sage", "align_until": 0}),
    "cse-fsl": Case({"algorithm": "cse-fsl"}),
    "splitfed-ms": Case({"algorithm": "splitfed-ms"}),
    "splitfed-ss": Case({"algorithm": "splitfed-ss"}),
    "fedavg": Case({"algorithm": "fedavg"}),
    "batch-norm-local": Case({"algorithm": "fsl-sage", "model": {"batch_norm": "local"}}),
    "batch-norm-local-fedavg": Case({"algorithm": "fedavg", "model": {"batch_norm": "local"}}),
    "batch-norm-group": Case({"algorithm": "fsl-sage", "model": {"batch_norm": "group"}}),
    "u-shape-splitfed-ss": Case({"algorithm": "splitfed-ss", "model": U}),
    "u-shape-fedavg": Case({"algorithm": "fedavg", "model": U}),
    "cohort-fsl-sage": Case({"algorithm": "fsl-sage", "cohort": 0.67, "rounds": 4, "data": SKEWED}),
    "cohort-cse-fsl": Case({"algorithm": "cse-fsl", "cohort": 0.67, "rounds": 4, "data": SKEWED}),
    "cohort-splitfed-ms": Case({"algorithm": "splitfed-ms", "cohort": 0.67, "rounds": 4, "data": SKEWED}),
    "warm-start": Case({"algorithm": "fsl-sage", "warm_start": True}),
    "scope-client-previous": Case({"algorithm": "fsl-sage", "alignment": {"scope": "client", "start": "previous"}}),
    "scope-client-server": Case({"algorithm": "fsl-sage", "alignment": {"scope": "client", "start": "server"}}),
    "scope-pooled-previous": Case(
        {"algorithm": "fsl-sage", "alignment": {"scope": "pooled", "start": "previous", "batch_size": 0, "passes": 2}}
    ),
    "optimizer": Case(
        {
            "algorithm": "cse-fsl",
            "order": "blocked",
            "weighting": "uniform",
            "local_steps": 5,
            "data": {"partition": "shards"},
            "optimizer": {"name": "sgd", "lr": 0.05, "schedule": "cosine", "warmup": 0.2, "label_smoothing": 0.1},
        }
    ),
    "resnet18": Case(
        {
            "algorithm": "fsl-sage",
            "rounds": 1,
            "clients": 2,
            "data": {"train_images": 64},
            "model": {"name": "resnet18"},
            "alignment": {"steps": 2},
        }
    ),
    "align-at-start": Case({"algorithm": "fsl-sage", "align_at": "start", "local_auxiliary": True}),
    "joint-step": Case({"algorithm": "splitfed-ss", "joint_step": True}),
    "sl": Case({"algorithm": "sl", "alternate": True, "hands_on_optimizer": True}),
    "local-loss": Case({"algorithm": "local-loss"}),
    "cpsl": Case({"algorithm": "cpsl", "draw_clusters": True}),
    "adaptsfl": Case({"algorithm": "adaptsfl", "average_every": 2}),
    "heron-sfl": Case({"algorithm": "heron-sfl"}),
    "fedgkt": Case({"algorithm": "fedgkt"}),
    "locfedmix-sl": Case({"algorithm": "locfedmix-sl"}),
    "fedprox": Case({"algorithm": "fedprox"}),
    "scaffold": Case({"algorithm": "scaffold", "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.0}}),
    "averaging-optimizer": Case(
        {"algorithm": "cse-fsl", "cohort": 0.67, "averaging": {"optimizer": "yogi", "lr": 0.01, "proximal": 0.1}}
    ),
    "averaging-rule": Case({"algorithm": "splitfed-ms", "averaging": {"rule": "trimmed-mean"}}),
    "resume": Case({"algorithm": "fsl-sage", "rounds": 5}, "resume"),
    "module": Case({"algorithm": "fsl-sage"}, own="module"),
    "folder": Case({"algorithm": "fsl-sage"}, own="folder"),
    "clients-folders": Case({"algorithm": "cse-fsl", "data": {"class_weights": "balanced"}}, own="clients"),
    "jsonl-labels": Case({"algorithm": "fsl-sage"}, own="labels"),
    "jsonl-prompts": Case({"algorithm": "cse-fsl"}, own="prompts"),
    "ray-fsl-sage": Case({"algorithm": "fsl-sage", "engine": "ray"}),
    "ray-splitfed-ss": Case({"algorithm": "splitfed-ss", "engine": "ray"}),
    "flower-fsl-sage": Case({"algorithm": "fsl-sage"}, "flower"),
    "flower-fedavg": Case(
        {"algorithm": "fedavg", "cohort": 0.67, "data": SKEWED, "upload_every": None, "align_every": None}, "flower"
    ),
    "lora-fsl-sage": Case({"algorithm": "fsl-sage"}, own="e2e"),
    "lora-splitfed-ss": Case({"algorithm": "splitfed-ss", "lora": {"dropout": 0.2}}, own="e2e"),
    "lora-fedavg": Case({"algorithm": "fedavg", "data": {"partition": "restaurant"}}, own="e2e"),
    "cost": Case({}, "cost"),
    "cost-lora": Case({}, "cost", own="e2e"),
}

_MAKE_OWN = """
import json, pathlib, sys
from tests.own_data import OWN_DATA, SMALL
from tests.texts import save_all

place, kinds = pathlib.Path(sys.argv[1]), sys.argv[2:]
options = {"e2e": save_all(place), "module": {"data": {"name": "same_bits_table:prices"}, "model": {"name": None}}}
for kind in set(kinds) & set(OWN_DATA):
    (place / kind).mkdir()
    options[kind] = {**SMALL, **OWN_DATA[kind](place / kind)}
print(json.dumps(options))
"""
# Modules move: a name is looked for in every module where it has been, newest first.
_FLOWER = """
import dataclasses
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

def find(name, *modules):
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise SystemExit(f"{name} is in none of {modules}")

for module in ("fsl_sage.engines.flower.courier", "fsl_sage.engines.flower.engine"):
    if find_spec(module):
        import_module(module).POLL = 0.02
config = dataclasses.replace(find("load_preset", "fsl_sage.config")(sys.argv[1]), algorithm=sys.argv[3])
out = Path(sys.argv[2])
agreement, shares = find("agree", "fsl_sage.deploy.app")(config, None)
find("write_app", "fsl_sage.deploy.app")(out / "app", config, agreement)
sites = find("write_sites", "fsl_sage.deploy.app")(out / "sites", shares, agreement)
file = out / "app" / "fsl_sage_app" / "config.json"
make_client_app = find("make_client_app", "fsl_sage.deploy.client_app", "fsl_sage.engines.flower.client_app")
grid = find("InProcessGrid", "tests.deploy.flower_grid", "tests.engines.flower_grid")(make_client_app(file))
for client in range(config.clients):
    grid.join(client, sites[client], out / "state")
options = {"data": "", "timeout": 60.0, "minimum": 1, "join-timeout": 1.0, "run-directory": str(out)}
find("serve", "fsl_sage.deploy.server_app")(file, grid, options)
"""


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `change` in it, table by table; None takes a value away."""
    merged = dict(base)
    for key, value in change.items():
        merged[key] = merge(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return {key: value for key, value in merged.items() if value is not None}


def to_toml(values: Mapping[str, Any]) -> str:
    """Plain values and one level of tables."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def spellings(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration as it is, then with more and more options under their older names."""
    older = merge({}, values)
    yield older
    for new, old in RENAMED_OPTIONS:
        *tables, name = new.split(".")
        table = older.get(tables[0], {}) if tables else older
        if name in table:
            older = merge(merge(older, _nested(new, None)), _nested(old, table[name]))
            yield older


def _nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: _nested(rest, value) if rest else value}


# Running


class RefusedError(RuntimeError):
    """The sources refuse a configuration."""


def run_case(tree: Path, case: Case, values: Mapping[str, Any], out: Path) -> Path:
    """Run a configuration with the sources of `tree`; returns the directory that holds what it wrote."""
    code = 0
    for number, spelled in enumerate(spellings(values)):
        directory = out / f"spelling{number}"
        directory.mkdir(parents=True)
        (directory / "case.toml").write_text(to_toml(spelled))
        with open(directory / "log.txt", "w") as log:
            code = _run(tree, case, directory, log)
        if code != 2:
            break
    if code:
        words = _last_words(directory / "log.txt")
        raise RefusedError(words) if code == 2 else RuntimeError(f"exit code {code}: {words}")
    return directory


def _run(tree: Path, case: Case, directory: Path, log: io.TextIOBase) -> int:
    file, run = str(directory / "case.toml"), str(directory / "run")
    # Not in the file, which holds options of several algorithms: each takes its own.
    algorithm = case.changes.get("algorithm", "fsl-sage")
    if case.how == "cost":
        with open(directory / "cost.json", "w") as out:
            return _python(tree, out, log, "-m", "fsl_sage", "cost", file, "--json").wait()
    if case.how == "flower":
        return _python(tree, log, log, "-c", _FLOWER, file, run, algorithm).wait()
    process = _python(tree, log, log, "-m", "fsl_sage", "run", file, "--algorithm", algorithm, "--out", run)
    if case.how == "resume" and _killed(process, directory / "run" / "checkpoint.safetensors"):
        process = _python(tree, log, log, "-m", "fsl_sage", "resume", run)
    return process.wait()


def _killed(process: subprocess.Popen[bytes], checkpoint: Path) -> bool:
    """Kill a run when its first checkpoint is there; False if it has ended by itself."""
    while process.poll() is None:
        if checkpoint.exists():
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.01)
    return False


def _python(tree: Path, out: Any, errors: Any, *arguments: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(tree / "src"), str(tree), str(ROOT / "tools")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.Popen([sys.executable, *arguments], cwd=tree, env=environment, stdout=out, stderr=errors)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing printed"


def check_out(commit: str, directory: Path) -> Path:
    """The sources and tests of a commit, beside the working tree."""
    archive = subprocess.run(["git", "archive", commit, "src", "tests"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        sys.exit(f"same-bits: {commit} cannot be checked out: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return directory


# Comparing


class Comparison(NamedTuple):
    """What two directories have in common."""

    difference: str | None
    """The first difference."""
    one_sided: list[str]
    """Metrics that only one side has; they are not compared."""


def compare(base: Path, here: Path) -> Comparison:
    """Compare what one configuration wrote with two source trees."""
    if (base / "cost.json").exists():
        known, found = (json.loads((path / "cost.json").read_text()) for path in (base, here))
        return compare_values(known, found, "cost")
    base, here = base / "run", here / "run"
    metrics = compare_metrics(*(_lines(path / "metrics.jsonl") for path in (base, here)))
    difference = (
        metrics.difference
        or compare_ledgers(*((path / "ledger.csv").read_text() for path in (base, here)))
        or compare_tensors(*(load_file(path / "model.safetensors") for path in (base, here)))
    )
    return Comparison(difference, metrics.one_sided)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def compare_metrics(base: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the rounds' metrics by the keys that both have, times excepted."""
    if len(base) != len(here):
        return Comparison(f"metrics: {len(base)} rounds, now {len(here)}", [])
    one_sided: list[str] = []
    for t, (known, found) in enumerate(zip(base, here, strict=True)):
        comparison = compare_values(_newest_names(known), _newest_names(found), f"metrics, round {t}")
        one_sided += [key for key in comparison.one_sided if key not in one_sided]
        if comparison.difference:
            return Comparison(comparison.difference, one_sided)
    return Comparison(None, one_sided)


def compare_values(base: Mapping[str, Any], here: Mapping[str, Any], where: str) -> Comparison:
    """Compare nested values by the keys that both have; floats must be equal."""
    one_sided = sorted(base.keys() ^ here.keys())
    for key in (key for key in base if key in here):
        if isinstance(base[key], Mapping) and isinstance(here[key], Mapping):
            inner = compare_values(base[key], here[key], f"{where}: {key}")
            one_sided += inner.one_sided
            if inner.difference:
                return Comparison(inner.difference, one_sided)
        elif json.dumps(base[key]) != json.dumps(here[key]):
            return Comparison(f"{where}: {key} {json.dumps(base[key])}, now {json.dumps(here[key])}", one_sided)
    return Comparison(None, one_sided)


def _newest_names(line: Mapping[str, Any]) -> dict[str, Any]:
    newest = {old: new for new, old in reversed(RENAMED_METRICS)}
    renamed = {}
    for key, value in line.items():
        while key in newest:
            key = newest[key]
        if key not in TIMES:
            renamed[key] = value
    return renamed


def compare_ledgers(base: str, here: str) -> str | None:
    """Compare two ledgers row by row; the order of rows within a round does not matter."""
    known, found = (sorted(csv.reader(text.splitlines()), key=_round_first) for text in (base, here))
    for a, b in zip(known, found, strict=False):
        if a != b:
            return f"ledger: {','.join(a)}, now {','.join(b)}"
    return None if len(known) == len(found) else f"ledger: {len(known)} rows, now {len(found)}"


def _round_first(row: Sequence[str]) -> tuple[Any, ...]:
    return (int(row[0]) if row[0].lstrip("-").isdigit() else -2, *row[1:])


def compare_tensors(base: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Compare two models: the same names, shapes, kinds of numbers and bits."""
    if base.keys() != here.keys():
        return f"model: tensors of one side only: {', '.join(sorted(base.keys() ^ here.keys())[:5])}"
    for name in sorted(base):
        known, found = base[name], here[name]
        if (known.shape, known.dtype) != (found.shape, found.dtype):
            return f"model: {name} is {known.dtype}{list(known.shape)}, now {found.dtype}{list(found.shape)}"
        if known.tobytes() != found.tobytes():
            apart = abs(known.astype("float64") - found.astype("float64")).max()
            return f"model: {name} differs by up to {apart:.3g}"
    return None


# The command

SAME, UNKNOWN, DIFFERENT, FAILED = "same", "BASE does not know it", "DIFFERS", "FAILS"


def main() -> None:
    parser = argparse.ArgumentParser(prog="same-bits", description=__doc__)
    parser.add_argument("base", help="the commit to compare the working tree with")
    parser.add_argument("--only", default="", help="run only the configurations whose names contain this")
    arguments = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if arguments.only in name}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        verdicts = _compare_all(arguments.base, cases, Path(folder))
    minutes = (time.perf_counter() - start) / 60
    unknown = f"; it does not know {verdicts[UNKNOWN]}, which are not compared" if verdicts[UNKNOWN] else ""
    print(
        f"{verdicts[SAME]} of {len(cases)} configurations are the same as {arguments.base}{unknown}; {minutes:.1f} min"
    )
    sys.exit(1 if verdicts[DIFFERENT] + verdicts[FAILED] else 0)


def _compare_all(commit: str, cases: Mapping[str, Case], folder: Path) -> Counter[str]:
    """Run every configuration with both trees and print a line for each; returns how many had which verdict."""
    base = check_out(commit, folder / "tree")
    own = _make_own(folder / "own", {case.own for case in cases.values()} - {""})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs: dict[str, list[Future[Path]]] = {}
        for name, case in cases.items():
            values = merge(merge(TINY, own[case.own] if case.own else {}), {**case.changes, "algorithm": None})
            pairs[name] = [
                pool.submit(run_case, tree, case, values, folder / side / name)
                for side, tree in (("base", base), ("here", ROOT))
            ]
        verdicts: Counter[str] = Counter()
        for name, pair in pairs.items():
            verdict, more = _verdict(pair)
            verdicts[verdict] += 1
            print(f"{name:<26} {verdict}{more}", flush=True)
    return verdicts


def _verdict(pair: Sequence[Future[Path]]) -> tuple[str, str]:
    """The verdict on a configuration, and what there is to say of it."""
    base, here = pair
    try:
        now = here.result()
    except RuntimeError as error:
        return FAILED, f" with the working tree: {error}"
    try:
        before = base.result()
    except RefusedError as error:
        return UNKNOWN, f": {error}"
    except RuntimeError as error:
        return FAILED, f" with BASE: {error}"
    comparison = compare(before, now)
    if comparison.difference:
        return DIFFERENT, f": {comparison.difference}"
    return SAME, f" (one side only: {', '.join(comparison.one_sided)})" if comparison.one_sided else ""


def _make_own(folder: Path, kinds: set[str]) -> dict[str, dict[str, Any]]:
    """Small data of these kinds, and tiny models for them; returns for each kind the options that use it."""
    if not kinds:
        return {}
    folder.mkdir()
    process = _python(ROOT, subprocess.PIPE, subprocess.PIPE, "-c", _MAKE_OWN, str(folder), *sorted(kinds))
    out, errors = process.communicate()
    if process.returncode:
        sys.exit(f"same-bits: the small data could not be made: {errors.decode().strip().splitlines()[-1]}")
    whole = {"train_images": None, "test_images": None}  # of TINY; here all examples are taken
    options: dict[str, dict[str, Any]] = json.loads(out.decode().splitlines()[-1])
    return {kind: {**values, "data": {**values["data"], **whole}} for kind, values in options.items()}


if __name__ == "__main__":
    main()
