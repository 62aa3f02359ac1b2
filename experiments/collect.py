"""Keep a comparison's raw data and its figures and tables: python experiments/collect.py RUNS RESULTS."""

import json
import shutil
import sys
from pathlib import Path

RAW = ("config.json", "metrics.jsonl", "ledger.csv", "result.json")
WHERE_THERE_ARE_CLASSES = ("classes.csv", "test_by_class.csv")
REPORT = ("report/figures", "report/tables")


def collect(runs: Path, results: Path) -> int:
    """Copy what a report needs of every finished run, at any depth of the folder; returns how many there were."""
    finished = sorted(runs.rglob("result.json"))
    for file in finished:
        target = results / file.parent.relative_to(runs)
        target.mkdir(parents=True, exist_ok=True)
        for name in RAW:
            shutil.copy2(file.parent / name, target / name)
        for name in (name for name in WHERE_THERE_ARE_CLASSES if (file.parent / name).exists()):
            shutil.copy2(file.parent / name, target / name)
        _hide_paths(target / "config.json")
        if (file.parent / "scores.json").exists():
            shutil.copy2(file.parent / "scores.json", target / "scores.json")
            _keep_written(file.parent / "samples.jsonl", target / "samples.jsonl")
    for name in (name for name in REPORT if (runs / name).exists()):
        shutil.copytree(runs / name, results / name, dirs_exist_ok=True)
    return len(finished)


def _hide_paths(file: Path) -> None:
    """Paths of this machine, relative to the working directory."""
    parent = Path.cwd().parent
    if parent != Path(parent.anchor):
        file.write_text(file.read_text().replace(str(parent), ".."))


def _keep_written(file: Path, target: Path) -> None:
    """Of the samples what the model wrote, and for which meaning; the references are the data set's."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [{name: text for name, text in sample.items() if name != "references"} for sample in samples]
    target.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(f"{collect(Path(sys.argv[1]), Path(sys.argv[2]))} finished runs are kept in {sys.argv[2]}")
