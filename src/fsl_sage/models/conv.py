"""A convolution that is faster on a CPU where its maps are small.

On maps of 1x1 and 2x2 pixels a padded 3x3 convolution multiplies mostly zeros, and up to 8x8 it multiplies more than it
has to. Here it becomes a few products of matrices that never meet a padded zero: one for every output pixel where it
has a stride (`_by_taps`), Winograd's minimal filtering where it has none (`_by_products`). All of it is differentiable
as often as wanted.

Under bfloat16 autocast the products have bfloat16 factors and are summed in float32. Winograd's have none of it: their
sums and differences would multiply the rounding of a factor by eight. There 2x2 maps take one plain product (`_dense`),
and larger ones torch's own convolution, which is faster in bfloat16 than Winograd's products in float32.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fsl_sage.models.flops import as_direct
from fsl_sage.models.layout import channels_last, in_channels_last, is_for_own_layers

Array = NDArray[np.float64]


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`: the same parameters, the same numbers up to rounding.

    Away from small maps on a CPU it is `nn.Conv2d`'s own operation; also where weights are in half precision.
    """

    def forward(self, input: Tensor) -> Tensor:
        """From images [N, channels in, H, W] to [N, channels out, H', W']."""
        if not self._pays(input):
            if _brief() and self._misses_taps(input):
                with torch.autocast("cpu", enabled=False):
                    return in_channels_last(super().forward, input.float()).bfloat16()
            return in_channels_last(super().forward, input)
        return as_direct(self, partial(in_channels_last, self._small), input)

    def _pays(self, x: Tensor) -> bool:
        """Whether the matrix products are faster: measured with one thread, 16 to 256 images, 16 to 512 channels."""
        if not is_for_own_layers(x) or self.groups != 1 or self.padding_mode != "zeros":
            return False
        if torch.is_autocast_enabled("cpu") != _brief():  # float16
            return False
        if x.dtype not in (torch.float32, torch.bfloat16 if _brief() else torch.float64):
            return False
        images, channels, rows, columns = x.shape
        if self.kernel_size == (1, 1):
            return self.stride == (2, 2) and self.padding == (0, 0) and max(rows, columns) <= 8
        if self.kernel_size != (3, 3) or self.padding != (1, 1) or self.dilation != (1, 1) or rows != columns:
            return False
        if self.stride == (1, 1):
            winograd = {} if _brief() else {4: channels >= 32, 8: channels >= 64 and images >= 64}
            enough = {1: True, 2: True, **winograd}
        else:
            # Of one pixel: see `_misses_taps`.
            enough = {1: _brief(), 2: True, 4: images >= 64} if self.stride == (2, 2) else {}
        return enough.get(rows, False)

    def _misses_taps(self, x: Tensor) -> bool:
        """Whether some taps meet no pixel: torch's bfloat16 kernel with a stride leaves their gradients unset."""
        if not is_for_own_layers(x) or max(self.stride) == 1:
            return False
        sides = zip(x.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return any(_misses(*side) for side in sides)  # padding by name is for a stride of 1

    def _small(self, x: Tensor) -> Tensor:
        weight = self.weight
        if _brief():
            x, weight = x.bfloat16(), weight.bfloat16()
        if self.kernel_size == (1, 1):
            y = _every_second(x, weight)
        elif x.shape[2] == 1:
            y = _middle_tap(x, weight)
        elif self.stride == (1, 1):
            y = _dense(x, weight) if _brief() else _by_products(x, weight)
        else:
            y = _by_taps(x, weight)
        return y if self.bias is None else y + self.bias[:, None, None].to(y.dtype)


def _brief() -> bool:
    """Whether this thread computes in bfloat16, by autocast."""
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def _every_second(x: Tensor, weight: Tensor) -> Tensor:
    """Kernel 1x1, stride 2: one product for all output pixels. x [N, C, H, W], weight [K, C, 1, 1]."""
    rows, columns = range(0, x.shape[2], 2), range(0, x.shape[3], 2)
    pixels = _pixels(x, [row * x.shape[3] + column for row, column in product(rows, columns)])
    return _map(pixels.flatten(0, 1) @ weight.flatten(1).T, len(rows), len(columns))


def _middle_tap(x: Tensor, weight: Tensor) -> Tensor:
    """One pixel, which only the middle tap meets. x [N, C, 1, 1], weight [K, C, 3, 3]."""
    return _map(x.flatten(1) @ weight.flatten(2)[:, :, 4].contiguous().T, 1, 1)


def _by_taps(x: Tensor, weight: Tensor) -> Tensor:
    """Stride 2: one product for every output pixel, over the taps that meet a pixel. x [N, C, H, H]."""
    pixels, taps, counts = _meetings(x.shape[2])
    patches = torch.split(_pixels(x, pixels), counts, dim=1)
    filters = torch.split(weight.flatten(2).transpose(1, 2).index_select(1, torch.tensor(taps)), counts, dim=1)
    y = [patch.flatten(1) @ filter.flatten(1).T for patch, filter in zip(patches, filters, strict=True)]
    return _map(torch.stack(y, dim=1), x.shape[2] // 2, x.shape[2] // 2)


def _dense(x: Tensor, weight: Tensor) -> Tensor:
    """2x2 pixels, each of which meets all four: one product. x [N, C, 2, 2], weight [K, C, 3, 3]."""
    (N, C, _, _), K = x.shape, weight.shape[0]
    places = list(product(range(2), range(2)))
    meetings = product(places, places)  # of an output pixel with an input pixel
    taps = [3 * (row - own_row + 1) + column - own_column + 1 for (own_row, own_column), (row, column) in meetings]
    filters = weight.flatten(2).transpose(1, 2).index_select(1, torch.tensor(taps)).view(K, 4, 4 * C)
    pixels = x.permute(0, 2, 3, 1).reshape(N, 4 * C)
    y = pixels @ filters.transpose(0, 1).reshape(4 * K, 4 * C).T
    return _map(y.view(N, 4, K), 2, 2)


def _pixels(x: Tensor, which: list[int]) -> Tensor:
    """The numbered pixels of x [N, C, H, W]: [N, len(which), C]."""
    return x.permute(0, 2, 3, 1).flatten(1, 2).index_select(1, torch.tensor(which))


def _map(y: Tensor, rows: int, columns: int) -> Tensor:
    """The map [N, K, rows, columns] of its pixels [N, rows, columns, K]."""
    return channels_last(y.view(-1, rows, columns, y.shape[-1]).permute(0, 3, 1, 2))


def _by_products(x: Tensor, weight: Tensor) -> Tensor:
    """A [(B x) (G w)], along rows as along columns. x [N, C, H, H], weight [K, C, 3, 3].

    A line of H pixels in t tiles takes P products for each tile: B is [P t, H], A [H, P t], and G [P P, 9] for both
    directions. The weights are the same in every tile, so tiles beside each other share one product of matrices.
    """
    (N, C, H, _), K = x.shape, weight.shape[0]
    B, G, A = (_like(table, x) for table in _tables(H))
    P, t = (3, 1) if H == 2 else (6, H // 4)
    lines = x.permute(2, 3, 0, 1).reshape(1, H, H * N * C)
    V = _transform(B, _transform(B, lines).view(P * t, H, N * C)).view(P * t * P, t * N, C)
    U = torch.bmm(G[None], weight.reshape(1, K * C, 9).transpose(1, 2))
    U = U.view(P, 1, P, K, C).expand(P, t, P, K, C).reshape(P * t * P, K, C)
    M: Tensor = _Products.apply(V, U)  # type: ignore[no-untyped-call]
    y = _transform(A, _transform(A, M.view(P * t, P * t, N * K)).view(1, P * t, H * N * K)).view(H, H, N, K)
    return channels_last(y.permute(2, 3, 0, 1))


class _Products(torch.autograd.Function):
    """V U' for V [b, n, C], U [b, K, C], as `bmm`; whose own gradient of U is stored transposed, and then copied."""

    @staticmethod
    def forward(ctx: FunctionCtx, V: Tensor, U: Tensor) -> Tensor:
        """V U', [b, n, K]."""
        ctx.save_for_backward(V, U)
        return torch.bmm(V, U.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, M: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of V and U from that of the product, [b, n, K]; None where it is not needed."""
        V, U = ctx.saved_tensors
        of_V, of_U = ctx.needs_input_grad
        of_U = of_U and _ASKED_FOR.weights
        return torch.bmm(M, U) if of_V else None, torch.bmm(M.transpose(1, 2), V) if of_U else None


class _AskedFor(threading.local):
    weights = True


_ASKED_FOR = _AskedFor()


@contextmanager
def gradients_of_inputs() -> Iterator[None]:
    """Within it this thread asks backward passes for gradients of inputs alone, so the products of weights are skipped.

    torch tells its own operations which gradients are asked for, but not a Function written in Python. That one knows
    only which weights are frozen.
    """
    _ASKED_FOR.weights = False
    try:
        yield
    finally:
        _ASKED_FOR.weights = True


def _transform(table: Tensor, x: Tensor) -> Tensor:
    """The table [i, j] times every x [b, j, k]; `matmul` would copy x transposed."""
    return torch.bmm(table.expand(x.shape[0], -1, -1), x)


def _like(table: Array, x: Tensor) -> Tensor:
    # A tensor of its own each time: a kept one would carry the mode (inference, tracing) in which it was first made.
    return torch.tensor(table, dtype=x.dtype, device=x.device)


@lru_cache
def _misses(size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether along a line of pixels a tap meets none at any output pixel."""
    starts = range(-padding, size + padding - dilation * (kernel - 1), stride)
    return any(all(not 0 <= start + tap * dilation < size for start in starts) for tap in range(kernel))


@lru_cache
def _meetings(size: int) -> tuple[list[int], list[int], list[int]]:
    """Which pixel meets which tap, one output pixel after the other; and how many meet at each."""
    line = [[(p, p - center + 1) for p in range(size) if abs(p - center) <= 1] for center in range(0, size, 2)]
    meetings = [list(product(rows, columns)) for rows, columns in product(line, line)]
    pixels = [row * size + column for meeting in meetings for (row, _), (column, _) in meeting]
    taps = [row * 3 + column for meeting in meetings for (_, row), (_, column) in meeting]
    return pixels, taps, [len(meeting) for meeting in meetings]


@lru_cache
def _tables(size: int) -> tuple[Array, Array, Array]:
    """B, G and A of `_by_products` for lines of 2 pixels, or of tiles of 4."""
    B, G, A = _line_of_two() if size == 2 else _line_of_tiles(size // 4)
    both: Array = np.kron(G, G).astype(np.float64)
    return B, both, A


def _line_of_two() -> tuple[Array, Array, Array]:
    """Karatsuba's three products: y0 = b (x0 + x1) + (c - b) x1, y1 = b (x0 + x1) + (a - b) x0, for taps a, b, c."""
    B = np.array([[1.0, 0], [1, 1], [0, 1]])
    G = np.array([[1.0, -1, 0], [0, 1, 0], [0, -1, 1]])
    A = np.array([[0.0, 1, 1], [1, 1, 0]])
    return B, G, A


def _line_of_tiles(tiles: int) -> tuple[Array, Array, Array]:
    """Winograd's F(4, 3), six products for four pixels; ordered by product first and by tile second."""
    # It multiplies polynomials by their values at points; of the usual choices these lose the fewest digits.
    points = np.sqrt([0, 0.5, 0.5, 2, 2]) * [0, 1, -1, 1, -1]

    def values(coefficients: int) -> Array:
        at_infinity = np.eye(coefficients)[-1:]
        return np.concatenate([np.vander(points, coefficients, increasing=True), at_infinity])

    B = np.zeros((6, tiles, 4 * tiles + 2))
    A = np.zeros((4 * tiles, 6, tiles))
    for tile in range(tiles):
        B[:, tile, 4 * tile : 4 * tile + 6] = np.linalg.inv(values(6)).T
        A[4 * tile : 4 * tile + 4, :, tile] = values(4).T
    padded = B.reshape(6 * tiles, -1)
    return padded[:, 1:-1], values(3), A.reshape(4 * tiles, -1)
