"""Pictures of a page in Chromium for the docs, each light and dark: python -m tools.screens NAME ADDRESS

The address is that of a page on this machine, such as the one that `fsl-sage watch DIR` prints, or of a file. The
pictures are docs/NAME-light.png and docs/NAME-dark.png. Of a page that is longer they show the first screen.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.report.browser import chromium

DOCS = Path(__file__).parents[1] / "docs"
SECONDS = 3
"""Until a page has drawn its curves."""


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 860), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("name")
    parser.add_argument("address")
    asked = parser.parse_args()
    for theme in ("light", "dark"):
        with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as page:
            page.size(*asked.size)
            features = [{"name": "prefers-color-scheme", "value": theme}]
            page.call("Emulation.setEmulatedMedia", features=features)
            page.open(asked.address)
            time.sleep(SECONDS)
            file = DOCS / f"{asked.name}-{theme}.png"
            page.picture(file)
            print(file.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
