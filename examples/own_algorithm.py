"""An algorithm of your own, with an option, beside FedAvg: python examples/own_algorithm.py"""

from dataclasses import dataclass

import torch

from fsl_sage import Algorithm, Config, DataConfig, ModelConfig, run


@dataclass(frozen=True)
class Options:
    """On the command line it is --clip; this text is its help."""

    clip: float = 1.0


class Clipped(Algorithm):
    """FedAvg whose clients clip the norm of their gradients."""

    title, colour, Options = "Clipped FedAvg", "#117733", Options
    uses, waits, has_s_server = (), False, False
    holds = averaged = ("client", "server")  # a client has, and the F-server averages, the whole model

    def local_round(self, client, t):  # at the client; it yields what it uploads
        for batch in client.batches(t):
            z = client.forward(batch)
            client.backward(z, client.server_gradient(z, batch.target))
            weights = [weight for part in self.averaged for weight in client.parameters(part).values()]
            torch.nn.utils.clip_grad_norm_(weights, self.options.clip)
            client.step()
        yield from ()


if __name__ == "__main__":
    common = {"clients": 3, "rounds": 2, "batch_size": 32, "model": ModelConfig(name="small-cnn")}
    data = DataConfig(train_images=600, test_images=200, partition="dirichlet", alpha=0.3)
    for name, options in (("own_algorithm:Clipped", {"clip": 0.5}), ("fedavg", {})):
        result = run(Config(algorithm=name, options=options, data=data, **common))
        print(f"{name:24} {result.best_score:.1%}")
