"""Models that do what few do: complex numbers, nested tensors, buffers of their own, modes of their own."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsl_sage import Config, ModelConfig, Score, TensorProblem, run
from fsl_sage.errors import InputError
from fsl_sage.records.files import load_tensors
from fsl_sage.split import SplitError, cut_points, split_model

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def trained(tmp_path, make, cut, algorithm="fedavg", x=X, y=Y, **changes):
    error = Score("test_error", higher_is_better=False)
    loss, metric = F.mse_loss, lambda output, target: (output - target).abs().mean(1)
    problem = TensorProblem((x[:32], y[:32]), (x[32:], y[32:]), make, loss, metric, error, cut=cut)
    config = Config(algorithm=algorithm, rounds=2, clients=2, batch_size=8, out=tmp_path / algorithm, **changes)
    return run(config, problem=problem)


class Spectral(nn.Module):
    """Multiplies frequencies by complex numbers; as parameters, or as a buffer that is not saved."""

    def __init__(self, saved):
        super().__init__()
        self.client, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        numbers = torch.randn(5, dtype=torch.cfloat)
        if saved:
            self.numbers = nn.Parameter(numbers)
        else:
            self.register_buffer("numbers", numbers, persistent=False)

    def forward(self, x):
        return self.head(self.middle(torch.fft.irfft(torch.fft.rfft(self.client(x)) * self.numbers, 8)).relu())


def test_complex_weights_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"'numbers' of the model holds complex numbers: keep it as real ones"):
        trained(tmp_path, lambda: Spectral(saved=True), "client")


def test_a_complex_buffer_keeps_its_imaginary_part(tmp_path, recwarn):
    assert trained(tmp_path, lambda: Spectral(saved=False), "client").metrics
    assert not any("imaginary" in str(each.message) for each in recwarn)


class Frequencies(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.waves, self.b, self.head = nn.Linear(6, 8), Frequencies(), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        a = self.a(x)
        return self.head(a + self.b(torch.fft.irfft(self.waves(a), 8)).relu())


def test_complex_numbers_do_not_cross():
    """They would get no gradient, silently, where a real tensor crosses beside them."""
    with pytest.raises(SplitError, match=r"'waves' returns complex numbers; let torch\.view_as_real of them cross"):
        split_model(Waves(), "waves", X[:4])
    assert "waves" not in [point.name for point in cut_points(Waves(), X[:4])]


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, tokens):
        return self.table(tokens), tokens == 0


class Padded(nn.Module):
    """In evaluation torch's encoder makes nested tensors of what a mask pads."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embedding, self.encoder, self.head = Embedding(), nn.TransformerEncoder(layer, 3), nn.Linear(8, 1)

    def forward(self, tokens):
        x, mask = self.embedding(tokens)
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])


@pytest.mark.parametrize("cut", ["embedding", "encoder.layers.0"])
def test_an_encoder_with_padding_is_trained(tmp_path, cut):
    tokens = torch.randint(1, 20, (40, 7), generator=torch.Generator().manual_seed(0))
    tokens[::3, 4:] = 0
    y = tokens.float().mean(1, keepdim=True)
    for algorithm in ("fedavg", "fsl-sage"):
        assert trained(tmp_path, Padded, cut, algorithm, tokens, y).metrics


Two = namedtuple("Two", "left right")


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        return Two(self.left(x), self.right(x))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.middle, self.head = Both(), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        both = self.both(x)
        return self.head(self.middle(both.left) + both.right)


def test_a_module_may_return_a_namedtuple(tmp_path):
    model = Named()
    for point in cut_points(model, X[:4]):
        split = split_model(model, point.name, X[:4])
        assert torch.equal(split(X), model(X))
    assert trained(tmp_path, Named, "middle").metrics


class Centred(nn.Module):
    """Moves a buffer in its own forward pass while it trains."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.register_buffer("center", torch.zeros(5))
        self.register_buffer("nothing", torch.zeros(0, 5))

    def forward(self, x):
        z = self.a(x)
        if self.training:
            with torch.no_grad():
                self.center.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return self.head(self.c(self.b(z - self.center).relu()))


def test_a_model_may_move_its_own_buffers_and_have_empty_ones(tmp_path):
    for algorithm in ("fedavg", "splitfed-ss", "fsl-sage"):
        assert trained(tmp_path, Centred, "b", algorithm).metrics


class Folded(nn.Module):
    """Folds the frames of a sample into the batch."""

    def __init__(self):
        super().__init__()
        self.frames, self.later, self.middle, self.head = (nn.Linear(a, b) for a, b in ((2, 4), (4, 4), (4, 4), (4, 1)))

    def forward(self, x):
        z = self.later(self.frames(x.view(-1, 2)).relu()).view(len(x), 3, 4).mean(1)
        return self.head(self.middle(z).relu())


def test_samples_that_take_several_rows_are_not_stored(tmp_path):
    assert trained(tmp_path, Folded, "frames", "splitfed-ss").metrics
    with pytest.raises(InputError, match=r"sends 'frames' across the cut with 3 rows for each sample"):
        trained(tmp_path, Folded, "frames", "fsl-sage")


class PartlyEvaluated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.cut, self.b, self.head = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8).eval(),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Linear(8, 1),
        )

    def forward(self, x):
        return self.head(self.b(self.cut(self.norm(self.a(x)))).relu())


@pytest.mark.parametrize("algorithm", ["fsl-sage", "splitfed-ss", "fedavg"])
def test_what_its_maker_put_into_evaluation_stays_there(tmp_path, algorithm):
    """Evaluations switched it on, but only at workers that had a part in them."""
    one = trained(tmp_path / "one", PartlyEvaluated, "cut", algorithm, workers=1)
    two = trained(tmp_path / "two", PartlyEvaluated, "cut", algorithm, workers=2)
    assert [each["test_loss"] for each in one.metrics] == [each["test_loss"] for each in two.metrics]
    assert load_tensors(one.model_file)[0]["norm.num_batches_tracked"] == 0


class InPlace(nn.Sequential):
    def __init__(self):
        acts = [nn.ReLU(inplace=True) for _ in range(2)]
        super().__init__(nn.Linear(6, 8), acts[0], nn.Linear(8, 8), acts[1], nn.Linear(8, 1))


@pytest.mark.parametrize("cut", ["0", "1"])
def test_a_linear_auxiliary_of_a_model_that_works_in_place(tmp_path, cut):
    assert trained(tmp_path, InPlace, cut, "fsl-sage", model=ModelConfig(auxiliary="linear")).metrics
