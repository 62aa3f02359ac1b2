from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from fsl_sage.models.attention import twice_differentiable_attention


def fused():
    return torch.backends.cuda.flash_sdp_enabled()


def test_the_switch_stays_until_the_last_one_is_out():
    before, barrier = fused(), Barrier(2, timeout=20)

    def early():
        with twice_differentiable_attention():
            barrier.wait()
        barrier.wait()

    def late():
        with twice_differentiable_attention():
            barrier.wait()
            barrier.wait()  # the other one is out
            return fused()

    with ThreadPoolExecutor(2) as pool:
        pool.submit(early)
        assert pool.submit(late).result() is False
    assert fused() == before


def test_attention_can_be_differentiated_twice():
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    with twice_differentiable_attention():
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert x.grad.abs().sum() > 0
