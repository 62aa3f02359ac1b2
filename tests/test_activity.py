"""What a run is doing is said while it does it; a callback may end it."""

import io
import re
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from fsl_sage import Tracker, resume, run
from fsl_sage.activity import now, told_to
from fsl_sage.algorithms import resolve
from fsl_sage.cli.terminal import Display
from fsl_sage.config import AlignmentConfig, Config, default_config, digest
from fsl_sage.errors import InputError
from fsl_sage.records.activity_file import ACTIVITY, PAUSE, ActivityFile, read_activity
from fsl_sage.records.plain_lines import SILENCE, PlainLines
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.trackers import StopRun


class Notes(Tracker):
    def __init__(self) -> None:
        self.doing: list[str] = []

    def activity(self, doing: str) -> None:
        self.doing.append(doing)


def test_every_stage_of_a_round_is_told(tiny) -> None:
    notes = Notes()
    run(tiny(rounds=1), [notes])
    told = [re.sub(r"\d+", "N", doing) for doing in notes.doing]
    wanted = [
        "loading the data",
        "building the model",
        "training client N of N",
        "aligning, step N of N",
        "evaluating, batch N of N",
        "writing the files of the round",
    ]
    assert [told.index(each) for each in wanted] == sorted(told.index(each) for each in wanted)
    assert {"training client 1 of 3", "training client 3 of 3", "aligning, step 4 of 4"} <= set(notes.doing)


def test_clients_that_wait_are_told_of_too(tiny) -> None:
    notes = Notes()
    run(tiny(rounds=1, algorithm="splitfed-ss"), [notes])
    assert "training 3 clients, exchange 2" in notes.doing


def test_who_no_longer_listens_is_not_told() -> None:
    heard: list[str] = []
    with told_to(heard.append):
        now("one")
    now("two")
    assert heard == ["one"]


def test_the_bar_says_what_is_going_on(tiny) -> None:
    console = Console(force_terminal=True, width=160, file=io.StringIO())
    display = Display(console)
    config = tiny()
    directory = RunDirectory.create(config)
    display.activity("loading the data")
    display.start(config, directory.path, [])
    display.activity("aligning, step 40 of 160")
    with console.capture() as seen:
        console.print(display._view())
    display.stop()
    assert "aligning, step 40 of 160" in seen.get()


def test_a_long_silence_is_broken_in_plain_output() -> None:
    time, lines = [0.0], []
    plain = PlainLines(lines.append, lambda: time[0])
    plain.activity("aligning, step 1 of 9")
    time[0] += SILENCE
    plain.activity("aligning, step 5 of 9")
    plain.activity("aligning, step 6 of 9")
    assert lines == ["  aligning, step 5 of 9"]


def test_who_looks_into_the_directory_is_told_by_a_file(tmp_path: Path) -> None:
    time = [0.0]
    writer = ActivityFile(tmp_path, lambda: time[0], lambda: time[0])
    writer.activity("training client 1 of 3")
    writer.activity("training client 2 of 3")
    assert read_activity(tmp_path) == {"doing": "training client 1 of 3", "time": 0.0, "workers": []}
    time[0] += PAUSE
    writer.activity("training client 3 of 3")
    assert read_activity(tmp_path)["doing"] == "training client 3 of 3"
    writer.activity("aligning, step 1 of 4")
    assert read_activity(tmp_path)["doing"] == "aligning, step 1 of 4", "a new stage is told at once"
    writer.close()
    assert [*tmp_path.iterdir()] == []
    assert read_activity(tmp_path) == {}


def test_the_file_says_what_each_worker_does(tmp_path: Path) -> None:
    time = [0.0]
    writer = ActivityFile(tmp_path, lambda: time[0], lambda: time[0])
    for worker in (0, 1):
        time[0] += PAUSE
        said = Thread(target=writer.activity, args=(f"training client {worker + 7} of 9",), name=f"worker_{worker}")
        said.start()
        said.join()
    assert read_activity(tmp_path)["workers"] == [
        {"name": "worker 1", "doing": "training client 7 of 9", "since": PAUSE},
        {"name": "worker 2", "doing": "training client 8 of 9", "since": 2 * PAUSE},
    ]
    writer.activity("evaluating")
    assert read_activity(tmp_path)["workers"] == [], "what they did before is over"


def test_a_thread_of_the_users_own_is_no_worker(tmp_path: Path) -> None:
    for name in ("worker_main", "worker_", "worker_1a"):
        writer = ActivityFile(tmp_path)
        said = Thread(target=writer.activity, args=("evaluating",), name=name)
        said.start()
        said.join()
        assert read_activity(tmp_path)["workers"] == []
        assert read_activity(tmp_path)["doing"] == "evaluating"
        writer.close()


def test_a_full_disk_does_not_end_a_run_that_only_tells_what_it_does(tmp_path: Path) -> None:
    writer = ActivityFile(tmp_path / "no such folder")
    writer.activity("training client 1 of 3")
    writer.close()


def test_a_run_tells_what_it_does_in_its_directory_while_it_does_it(tiny) -> None:
    class Looks(Tracker):
        def start(self, config, directory, done) -> None:
            self.directory, self.seen = directory, []

        def round(self, metrics) -> None:
            self.seen.append(read_activity(self.directory)["doing"])

    looks, config = Looks(), tiny(rounds=2)
    run(config, [looks])
    assert looks.seen == ["writing the files of the round"] * 2
    assert not (config.out / ACTIVITY).exists()


class Patience(Tracker):
    def round(self, metrics) -> None:
        if metrics["round"] == 1:
            raise StopRun("two rounds are enough")


def test_a_callback_ends_a_run(tiny) -> None:
    notes = Notes()
    config = tiny(rounds=5)
    result = run(config, [Patience(), notes])
    assert (len(result.metrics), result.stopped) == (2, "two rounds are enough")
    assert result.model_file.exists()
    assert RunDirectory(config.out).result()["stopped"] == "two rounds are enough"
    with pytest.raises(InputError, match="is finished"):
        resume(str(config.out))
    short = tiny(rounds=2)
    run(short)
    assert (short.out / "model.safetensors").read_bytes() == result.model_file.read_bytes()


def test_few_texts_are_aligned_in_few_passes() -> None:
    import torch

    from fsl_sage.alignment.matching import _order

    def steps(batches: int, config: AlignmentConfig) -> int:
        return len(_order([1] * batches, config, torch.Generator()))

    texts = default_config("e2e").alignment
    assert steps(1, texts) == 8  # 90 texts are one batch
    assert steps(20, texts) == 120  # what five clients have in store, as before
    assert steps(1, Config().alignment) == 120  # images, as before


def test_an_option_of_a_later_version_does_not_change_an_older_run(tiny) -> None:
    config = tiny(data={"name": "e2e"})
    directory = RunDirectory.create(config)
    text = directory.config_file.read_text()
    directory.config_file.write_text(re.sub(r'\s*"max_passes": null,', "", text))
    assert "max_passes" not in directory.config_file.read_text()
    assert digest(resolve(directory.config())) == digest(config)
