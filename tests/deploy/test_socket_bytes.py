"""The ledger of a coded run beside what a proxy counts on the sockets of a real federation."""

from dataclasses import replace

import pytest

pytest.importorskip("flwr")

from benchmarks.flower_overhead import CONFIG, measure

from fsl_sage.config import CodecConfig

from .prestarted import ForkingFederation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


def test_what_crosses_the_sockets_is_what_the_ledger_says_and_little_more(tmp_path):
    """With the small codecs a round is an eighth of its plain bytes, so arrays sent as they were would be seen.

    What is left over is framing: TLS, HTTP, polling, names of arrays, and the app, which goes to every node once.
    """
    data = replace(CONFIG.data, train_images=32, test_images=10)
    codec = CodecConfig(preset="small")
    config = replace(CONFIG, clients=2, rounds=2, batch_size=16, data=data, codec=codec, threads=1)
    moved, payload = measure(config, tmp_path, ForkingFederation)
    assert 0 < moved - payload < 0.03 * payload
