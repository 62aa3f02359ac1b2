import pytest
import torch

from fsl_sage.errors import InputError
from fsl_sage.wire.ledger import BEFORE, Ledger
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import AUXILIARY, CLIENT_MODEL, FIRST_DOWNLOAD, Message
from fsl_sage.wire.post import Download, Post


def arrays(count, name="w"):
    return {name: torch.zeros(count, dtype=torch.uint8)}


NEWEST = Message({CLIENT_MODEL: arrays(100)})
HELD = Message({CLIENT_MODEL: arrays(100), AUXILIARY: arrays(40)})
DOWNLOAD = Download(NEWEST, HELD)
ALIGNED = Message({AUXILIARY: arrays(40)})


def new_post(clients):
    ledger = Ledger()
    return Post(Link(ledger), clients), ledger


def downloads(ledger, t):
    return {(entry.client, entry.kind): entry.bytes for entry in ledger.entries(t)}


def play(post, t, cohort, aligned=()):
    post.welcome(t, cohort, DOWNLOAD)
    for client in cohort:
        post.arrived(client)
    post.renew()
    post.broadcast(t, cohort, NEWEST)
    for client in aligned:
        post.send(t, client, ALIGNED, present=client in cohort)


def test_full_cohort_pays_each_round_for_what_it_made():
    post, ledger = new_post(2)
    play(post, 0, [0, 1], aligned=[0, 1])
    play(post, 1, [0, 1])
    assert downloads(ledger, BEFORE) == {(0, FIRST_DOWNLOAD): 140, (1, FIRST_DOWNLOAD): 140}
    assert downloads(ledger, 0) == {(c, k): b for c in (0, 1) for k, b in ((CLIENT_MODEL, 100), (AUXILIARY, 40))}
    assert downloads(ledger, 1) == {(0, CLIENT_MODEL): 100, (1, CLIENT_MODEL): 100}


def test_an_absent_client_pays_when_it_returns_and_only_for_the_newest():
    post, ledger = new_post(2)
    play(post, 0, [0, 1])
    play(post, 1, [0], aligned=[0, 1])
    play(post, 2, [0], aligned=[0, 1])
    assert (1, CLIENT_MODEL) not in downloads(ledger, 1)
    play(post, 3, [1])
    # On its return the weights of round 2 and one auxiliary, then what round 3 makes.
    assert downloads(ledger, 3) == {(1, CLIENT_MODEL): 200, (1, AUXILIARY): 40}


def test_a_client_that_comes_late_pays_for_all_it_holds():
    post, ledger = new_post(2)
    play(post, 0, [0])
    play(post, 1, [0, 1])
    assert downloads(ledger, BEFORE) == {(0, FIRST_DOWNLOAD): 140}
    assert downloads(ledger, 1) == {(0, CLIENT_MODEL): 100, (1, CLIENT_MODEL): 200, (1, AUXILIARY): 40}


def test_a_late_client_pays_once_for_an_auxiliary_that_waits_for_it():
    post, ledger = new_post(2)
    play(post, 0, [0], aligned=[0, 1])
    play(post, 1, [0, 1])
    assert downloads(ledger, 1) == {(0, CLIENT_MODEL): 100, (1, CLIENT_MODEL): 200, (1, AUXILIARY): 40}


def test_a_hand_over_between_groups_is_billed_once():
    """One download for each visit: in its turn, or for the first after the last average, which it will start from."""
    post, ledger = new_post(3)
    for t in range(2):
        for client in range(3):
            post.welcome(t, [client], DOWNLOAD)
            post.arrived(client)
            post.renew()
        post.broadcast(t, [0], NEWEST)
        assert downloads(ledger, t) == {(client, CLIENT_MODEL): 100 for client in range(3)}
    assert downloads(ledger, BEFORE) == {(0, FIRST_DOWNLOAD): 140, (1, FIRST_DOWNLOAD): 40, (2, FIRST_DOWNLOAD): 40}


def test_frozen_weights_are_a_first_download_whenever_a_client_comes():
    post, ledger = new_post(2)
    frozen = Download(NEWEST, HELD, arrays(1000))
    post.welcome(0, [0], frozen)
    post.renew()
    post.broadcast(0, [0], NEWEST)
    post.welcome(1, [0, 1], frozen)
    assert downloads(ledger, BEFORE) == {(0, FIRST_DOWNLOAD): 1140}
    assert downloads(ledger, 1) == {(1, FIRST_DOWNLOAD): 1000, (1, CLIENT_MODEL): 100, (1, AUXILIARY): 40}
    assert ledger.paper == 240


def test_a_client_that_was_lost_gets_and_pays_everything_anew():
    post, ledger = new_post(1)
    play(post, 0, [0], aligned=[0])
    post.welcome(1, [0], DOWNLOAD)
    post.lost(0)
    assert post.waiting[0]
    play(post, 2, [0])
    assert downloads(ledger, 2) == {(0, CLIENT_MODEL): 200, (0, AUXILIARY): 40}


def test_a_client_that_was_lost_before_it_was_heard_from_gets_its_first_download_again():
    post, ledger = new_post(2)
    frozen = Download(NEWEST, HELD, arrays(1000))
    post.welcome(0, [0, 1], frozen)
    post.arrived(0)
    post.lost(1)
    post.renew()
    post.broadcast(0, [0], NEWEST)
    again, other = new_post(2)
    again.load_state(*post.state())
    for p, billed in ((post, ledger), (again, other)):
        p.welcome(1, [0, 1], frozen)
        assert downloads(billed, 1) == {(1, FIRST_DOWNLOAD): 1000, (1, CLIENT_MODEL): 100, (1, AUXILIARY): 40}


def test_state_goes_through_a_checkpoint():
    post, ledger = new_post(3)
    play(post, 0, [0, 1])
    play(post, 1, [0], aligned=[0, 1])
    again, other = new_post(3)
    again.load_state(*post.state())
    before = ledger.total
    for p in (post, again):
        play(p, 2, [1, 2])
    assert other.total == ledger.total - before


@pytest.mark.parametrize("kind", ["soft/labels", "labels@change"])
def test_a_kind_that_a_checkpoint_would_take_apart_is_refused(kind):
    with pytest.raises(InputError, match="give it a name without / and @"):
        Message({kind: {"x": torch.ones(2)}})
