"""Lines of JSON: what is read, and what is refused with the file and the line."""

import json

import pytest

from fsl_sage.errors import InputError
from fsl_sage.problems.texts.rows import jsonl_kind, label_names, read_jsonl


def write(file, rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def labelled(count, labels=("bad", "good")):
    return [{"text": f"text {i}", "label": labels[i % len(labels)]} for i in range(count)]


def test_a_file_is_divided_and_a_folder_is_not(tmp_path):
    rows = read_jsonl(write(tmp_path / "all.jsonl", labelled(20)), 0.2)
    assert (rows.kind, len(rows.train), len(rows.test)) == ("labels", 16, 4)
    assert sorted(row.answer for row in rows.test) == ["bad", "bad", "good", "good"]
    assert read_jsonl(tmp_path / "all.jsonl", 0.2) == rows
    write(tmp_path / "both" / "train.jsonl", labelled(6))
    write(tmp_path / "both" / "test.jsonl", labelled(2))
    rows = read_jsonl(tmp_path / "both", 0.2)
    assert [row.text for row in rows.test] == ["text 0", "text 1"]
    assert rows.test[1].place == f"line 2 of {tmp_path / 'both' / 'test.jsonl'}"
    assert jsonl_kind(tmp_path / "both") == "labels"


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    """Editors on Windows write it before the first line."""
    plain, marked = write(tmp_path / "plain.jsonl", labelled(20)), tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert [row.text for row in read_jsonl(marked, 0.2).train] == [row.text for row in read_jsonl(plain, 0.2).train]


def test_labels_are_names_or_numbers(tmp_path):
    assert label_names(read_jsonl(write(tmp_path / "a.jsonl", labelled(20)), 0.2)) == ("bad", "good")
    assert label_names(read_jsonl(write(tmp_path / "b.jsonl", labelled(20, (1, 0, 2))), 0.2)) == ("0", "1", "2")


def test_blank_lines_and_further_columns_do_not_matter(tmp_path):
    lines = [{"id": i, **row} for i, row in enumerate(labelled(10))]
    rows = read_jsonl(write(tmp_path / "all.jsonl", [*lines[:5], "", *lines[5:]]), 0.2)
    assert len(rows.train) + len(rows.test) == 10
    assert {row.place.split()[1] for row in rows.train + rows.test} == {*"12345789", "10", "11"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3 of .*all.jsonl is not JSON"),
        ("[1]", "line 3 of .*all.jsonl is not a JSON object"),
        ({"text": "x"}, "line 3 of .*all.jsonl has no 'label': every line needs text and label"),
        ({"prompt": "x", "completion": "y"}, "line 3 of .*all.jsonl has no 'text'"),
        ({"text": " ", "label": "bad"}, "'text' in line 3 of .*all.jsonl is ' ': give a text"),
        ({"text": 3, "label": "bad"}, "'text' in line 3 of .*all.jsonl is 3: give a text"),
        ({"text": "x", "label": 0.5}, "'label' in line 3 of .*all.jsonl is 0.5: give a text or a whole number"),
        ({"text": "x", "label": None}, "'label' in line 3 of .*all.jsonl is None"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, said):
    with pytest.raises(InputError, match=said):
        read_jsonl(write(tmp_path / "all.jsonl", [*labelled(2), line, *labelled(8)]), 0.2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "is empty"),
        ([{"question": "x", "answer": "y"}], "line 1 of .* has question, answer: give prompt and completion or text"),
        ([{"prompt": "x", "completion": ""}] * 9, "'completion' in line 1 of .* is '': give a text"),
        (labelled(2), "a test fraction of 0.2 leaves too few"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, rows, said):
    with pytest.raises(InputError, match=said) as caught:
        read_jsonl(write(tmp_path / "all.jsonl", rows), 0.2)
    assert "all.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (labelled(4, (0, 1, 7)), labelled(2, (0,)), "The label 7 in line 3 of .*train.jsonl is out of range"),
        (labelled(4, (0, -1)), labelled(2, (0,)), "The label -1 in line 2 of .*train.jsonl is out of range"),
        (labelled(4), labelled(3, ("bad", "bad", "new")), "the label 'new' in line 3 of .*test.jsonl, and no training"),
        (labelled(4, ("a", 1)), labelled(1, ("a",)), "in line 1 of .* is a text and the one in line 2 of .* a number"),
        (labelled(4, ("a",)), labelled(1, ("a",)), "All training texts of .* have the label a"),
        (labelled(4), [{"prompt": "x", "completion": "y"}], "line 1 of .*test.jsonl has other columns than line 1 of"),
    ],
)
def test_labels_that_do_not_fit_are_named(tmp_path, train, test, said):
    write(tmp_path / "both" / "train.jsonl", train)
    write(tmp_path / "both" / "test.jsonl", test)
    with pytest.raises(InputError, match=said):
        label_names(read_jsonl(tmp_path / "both", 0.2))


def test_what_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl cannot be read: No such file"):
        read_jsonl(tmp_path / "nowhere.jsonl", 0.2)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"bytes\.jsonl is not a text in UTF-8"):
        read_jsonl(tmp_path / "bytes.jsonl", 0.2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"text": "half a letter: \\ud800", "label": "bad"}', "'text' in line 21 of .*: give a text"),
        ('{"text": "a", "label": "\\udfff"}', "'label' in line 21 of"),
        ('{"text": "a", "label": true}', "'label' in line 21 of .* is True"),
        ('{"text": ' + "[" * 100_000, "line 21 of .* is not JSON"),
        ('{"text": "a", "label": ' + "9" * 5000 + "}", "line 21 of .* is not JSON"),
    ],
    ids=["surrogate", "surrogate label", "truth", "depth", "digits"],
)
def test_what_json_can_say_and_no_tokenizer_takes(tmp_path, row, said):
    with pytest.raises(InputError, match=said):
        read_jsonl(write(tmp_path / "x.jsonl", [*labelled(20), row]), 0.2)


def test_a_label_of_thousands_of_digits_is_not_repeated_at_length(tmp_path):
    rows = [*labelled(20, (0, 1)), {"text": "a", "label": 10**4000}]
    with pytest.raises(InputError, match="out of range") as refusal:
        label_names(read_jsonl(write(tmp_path / "x.jsonl", rows), 0.2))
    assert len(str(refusal.value)) < 500 + len(str(tmp_path))


def test_a_file_of_one_endless_line_is_not_read_as_a_whole(tmp_path, monkeypatch):
    """A sparse file of 4 TiB: whoever reads its line before looking at its length never comes back."""
    with open(tmp_path / "x.jsonl", "wb") as file:
        file.truncate(2**42)
    monkeypatch.setattr("fsl_sage.problems.texts.rows.LONGEST_LINE", 2**16)
    with pytest.raises(InputError, match=r"line 1 of .* has more than 65,536 characters"):
        read_jsonl(tmp_path / "x.jsonl", 0.2)
