"""Writes a Flower app, ready for `flwr run`, and the data of its sites where one machine plays all of them."""

import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path

from fsl_sage.config import Config
from fsl_sage.deploy.agreement import MODEL, Agreement, check, write_agreement
from fsl_sage.engines.process import is_installed
from fsl_sage.errors import InputError
from fsl_sage.models.language import model_path
from fsl_sage.own_modules import import_own, is_own
from fsl_sage.problems.sites import Shares, agree_on, write_shares

PACKAGE = "fsl_sage_app"

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fsl-sage-app"
version = "1.0.0"
description = "{algorithm} at {clients} sites"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41,<1.42", "fsl-sage[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fsl-sage"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Change them for one run with: flwr run . NAME --run-config 'run-directory="/srv/runs/one" timeout=600.0'
[tool.flwr.app.config]
run-directory = "runs/federation"  # on the server; a run that was interrupted there is resumed
data = ""                          # the server's test data, if not those of config.json: npz:PATH
timeout = 3600.0                   # seconds that the clients have for a round
minimum = 1                        # the fewest clients whose replies make a round
join-timeout = 120.0               # seconds that the first round waits for all clients to be connected
"""

LICENSE = """\
Licensed under the Apache License, Version 2.0 (the "License"); you may not use this app except in compliance with the
License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0. Unless required by
applicable law or agreed to in writing, software distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""

APP = '''\
"""The {role} of the app; its configuration is in config.json."""

from pathlib import Path

from {module} import {make}

app = {make}(Path(__file__).with_name("config.json"))
'''

MODULES = {
    "server_app": ("ServerApp", "fsl_sage.deploy.server_app", "make_server_app"),
    "client_app": ("ClientApp", "fsl_sage.deploy.client_app", "make_client_app"),
}


def write_app(directory: Path, config: Config, agreement: Agreement) -> None:
    """A new directory with an app for `flwr run`."""
    check(config, agreement)
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory} is not empty: give a new directory for the app.")
    package = directory / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    pyproject = PYPROJECT.format(algorithm=config.algorithm, clients=config.clients, package=PACKAGE)
    (directory / "pyproject.toml").write_text(pyproject)
    (directory / "LICENSE").write_text(LICENSE)
    (package / "__init__.py").write_text("")
    for name in (config.algorithm, config.model.name, config.data.name, config.data.augmentation or ""):
        carry_module(name, directory)
    carry_structure(config.model.name, package / MODEL)
    write_agreement(package / "config.json", replace(config, engine="flower", out=None), agreement)
    for name, (role, module, make) in MODULES.items():
        (package / f"{name}.py").write_text(APP.format(role=role, module=module, make=make))


def carry_module(name: str, directory: Path) -> None:
    """Copy the module of an algorithm, model, problem or augmentation MODULE:NAME into the app, to be imported there.

    A module that is installed is not copied: server and sites have it installed too. Of a package the files of the
    modules that lead to it are copied; what it imports besides must be at the sites.
    """
    if not is_own(name):
        return
    import_own(name, "")
    names = name.partition(":")[0].split(".")
    for count in range(1, len(names) + 1):
        file = getattr(sys.modules[".".join(names[:count])], "__file__", None)
        if file is None:  # a folder without an __init__.py
            continue
        if is_installed(file):
            return
        place = directory.joinpath(*names[:count])
        target = place / "__init__.py" if Path(file).stem == "__init__" else place.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def carry_structure(name: str, directory: Path) -> None:
    """Put the configuration of a model hf:PATH into the app: from it a site builds the structure, without files."""
    path = model_path(name) if name.startswith("hf:") else None
    if path is not None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path / "config.json", directory / "config.json")


def agree(config: Config, examples: tuple[int, ...] | None) -> tuple[Agreement, Shares]:
    """The agreement on a data set, and the clients' shares of it; with `examples` the data are at the sites."""
    terms, shares = agree_on(config, at_sites=examples is not None)
    values = {field.name: getattr(terms, field.name) for field in fields(terms)}
    return Agreement(**values, examples=examples or tuple(len(share) for share in shares)), shares


def write_sites(directory: Path, shares: Shares, agreement: Agreement) -> list[Path]:
    """The examples of each client in a file of its own, as a site would have them."""
    return write_shares(directory, shares, agreement)
