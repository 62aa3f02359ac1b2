"""The comparison behind `make same-bits` finds the smallest difference."""

import tomllib
from concurrent.futures import Future

import numpy as np
import pytest
from safetensors.numpy import save_file
from tools import same_bits
from tools.same_bits import (
    DIFFERENT,
    FAILED,
    UNKNOWN,
    RefusedError,
    _verdict,
    compare,
    compare_ledgers,
    compare_metrics,
    compare_tensors,
    merge,
    spellings,
    to_toml,
)

LEDGER = "round,client,direction,kind,bytes\n-1,0,down,auxiliary,8\n0,0,up,activations,64\n0,1,up,activations,64\n"


def write(directory, metrics='{"round": 0, "test_loss": 1.5, "seconds": 1}\n', ledger=LEDGER, weight=1.0):
    (directory / "run").mkdir(parents=True)
    (directory / "run" / "metrics.jsonl").write_text(metrics)
    (directory / "run" / "ledger.csv").write_text(ledger)
    save_file({"weight": np.array([weight, 2.0], np.float32)}, directory / "run" / "model.safetensors")
    return directory


def test_times_do_not_count(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", '{"round": 0, "test_loss": 1.5, "seconds": 2}\n')
    assert compare(a, b) == (None, [])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"metrics": '{"round": 0, "test_loss": 1.5000000000000002}\n'}, "metrics, round 0: test_loss"),
        ({"metrics": ""}, "1 rounds, now 0"),
        ({"ledger": LEDGER.replace("0,1,up,activations,64", "0,1,up,activations,65")}, "activations,64, now 0,1"),
        ({"ledger": LEDGER + "1,0,up,labels,4\n"}, "4 rows, now 5"),
        ({"weight": np.nextafter(np.float32(1), np.float32(2))}, "model: weight differs by up to 1.19e-07"),
    ],
)
def test_one_bit_is_a_difference(tmp_path, change, told):
    assert told in compare(write(tmp_path / "a"), write(tmp_path / "b", **change)).difference


def test_zeros_of_different_sign_and_other_names_are_differences():
    assert compare_tensors({"w": np.float32([0.0])}, {"w": np.float32([-0.0])})
    assert "one side only: v, w" in compare_tensors({"w": np.zeros(1)}, {"v": np.zeros(1)})
    assert "now float64[1]" in compare_tensors({"w": np.zeros(1, np.float32)}, {"w": np.zeros(1)})


def test_the_order_of_rows_in_a_round_does_not_count():
    head, *rows = LEDGER.splitlines(keepends=True)
    assert compare_ledgers(LEDGER, head + "".join(reversed(rows))) is None


def test_only_common_keys_count_and_renamed_ones_are_common(monkeypatch):
    monkeypatch.setattr(same_bits, "RENAMED_METRICS", [("newest", "newer"), ("newer", "old")])
    assert compare_metrics([{"old": 1, "gone": 2}], [{"newest": 1, "new": 3}]) == (None, ["gone", "new"])
    assert "newest 1, now 2" in compare_metrics([{"old": 1}], [{"newest": 2}]).difference


def test_older_spellings_come_one_renaming_after_the_other(monkeypatch):
    monkeypatch.setattr(same_bits, "RENAMED_OPTIONS", [("sage.every", "align_every"), ("x", "y"), ("rounds", "T")])
    asked = {"rounds": 3, "sage": {"every": 2, "rest": 1}}
    assert list(spellings(asked)) == [
        asked,
        {"rounds": 3, "align_every": 2, "sage": {"rest": 1}},
        {"T": 3, "align_every": 2, "sage": {"rest": 1}},
    ]


def test_what_only_the_working_tree_knows_is_no_difference(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", weight=2.0)

    def ended(result):
        future = Future()
        future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
        return future

    refused, failed = RefusedError("--algorithm sl is not known"), RuntimeError("exit code 1")
    assert _verdict([ended(refused), ended(b)]) == (UNKNOWN, ": --algorithm sl is not known")
    assert _verdict([ended(a), ended(b)])[0] == DIFFERENT
    assert [_verdict([ended(x), ended(y)])[0] for x, y in ((failed, b), (a, failed), (a, refused))] == [FAILED] * 3


def test_every_configuration_can_be_written_down():
    for case in same_bits.CASES.values():
        values = merge(same_bits.TINY, case.changes)
        assert tomllib.loads(to_toml(values)) == values
