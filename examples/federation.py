"""Three organisations that keep their data, over TLS on this machine: python examples/federation.py"""

import tempfile
from pathlib import Path

from fsl_sage import AlignmentConfig, Config, DataConfig, ModelConfig
from fsl_sage.deploy.app import agree, write_app, write_sites
from fsl_sage.deploy.processes import NAME, LoopbackFederation

config = Config(
    algorithm="fsl-sage",
    clients=3,
    rounds=2,
    batch_size=32,
    options={"align_every": 1},
    device="cpu",
    model=ModelConfig(name="small-cnn"),
    data=DataConfig(train_images=300, test_images=200, partition="dirichlet", alpha=0.5),
    alignment=AlignmentConfig(steps=30),  # 120 align better and take longer
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, LoopbackFederation(Path(folder, "federation")) as federation:
        agreement, shares = agree(config, None)  # what the parties agree on, and who has which images
        write_app(Path(folder, "app"), config, agreement)
        sites = write_sites(Path(folder, "sites"), shares, agreement)  # a file for each organisation
        federation.start_superlink()  # the server, with a certificate of its own CA
        federation.register(range(config.clients))  # it knows the key of each site, and nobody else
        for client, site in enumerate(sites):
            federation.start_node(client, site)
        federation.flwr("run", f"{folder}/app", NAME, "--stream", "--run-config", f'run-directory="{folder}/run"')
        print(Path(folder, "run", "result.json").read_text())
