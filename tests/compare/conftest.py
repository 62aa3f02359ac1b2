import pytest

from tests.compare.small_grid import PRESET


@pytest.fixture
def preset(tmp_path):
    file = tmp_path / "preset.toml"
    file.write_text(PRESET)
    return file
