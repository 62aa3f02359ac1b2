from hypothesis import given
from hypothesis import strategies as st

from fsl_sage.wire.ledger import BEFORE, Ledger, totals
from fsl_sage.wire.message import ACTIVATIONS, AUXILIARY, FIRST_DOWNLOAD, LABELS

kinds = st.sampled_from([ACTIVATIONS, AUXILIARY, LABELS, FIRST_DOWNLOAD])
bills = st.lists(
    st.tuples(st.integers(BEFORE, 3), st.integers(0, 4), st.sampled_from(["up", "down"]), kinds, st.integers(0, 10**12))
)


@given(bills)
def test_every_byte_is_in_exactly_one_entry(bills):
    ledger = Ledger()
    for bill in bills:
        ledger.bill(*bill)
    entries = [entry for t in range(BEFORE, 4) for entry in ledger.entries(t)]
    assert len({entry[:4] for entry in entries}) == len(entries)
    assert sum(entry.bytes for entry in entries) == ledger.total == sum(bill[4] for bill in bills)
    assert ledger.paper == sum(bill[4] for bill in bills if bill[3] not in (LABELS, FIRST_DOWNLOAD))
    assert ledger.total == sum(totals(ledger.by_kind(t))[0] for t in range(BEFORE, 4))
    assert ledger.paper == sum(totals(ledger.by_kind(t))[1] for t in range(BEFORE, 4))


@given(bills)
def test_entries_written_round_by_round_give_the_ledger_back(bills):
    ledger, again = Ledger(), Ledger()
    for bill in bills:
        ledger.bill(*bill)
    for t in range(4):
        again.load(ledger.written_in(t))
    assert (again.total, again.paper) == (ledger.total, ledger.paper)
