"""The figures of README and docs, each light and dark: python -m tools.figures roles | curve RUN | dark

`roles` draws the three roles and what travels between them; `curve` the headline score of a finished run against
communication, as `make run` has it. `dark` writes, beside every figure of a report that a page shows, the same on a
dark ground.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parents[1] / "docs"
THEMES = {
    "light": {
        "ink": "#1d2430", "soft": "#5b6575", "line": "#c9ced6", "card": "#ffffff", "inner": "#f3f5f8",
        "model": "#0072b2", "data": "#b85c00", "auxiliary": "#a8487d",
    },
    "dark": {
        "ink": "#e6eaf1", "soft": "#a3adbb", "line": "#465062", "card": "#161b22", "inner": "#212833",
        "model": "#5cb3e8", "data": "#f0a04b", "auxiliary": "#e39cc4",
    },
}  # fmt: skip
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans','Liberation Sans',sans-serif"


def roles(theme: str) -> str:
    """The picture of the three roles as an SVG; its ground is transparent."""
    c = THEMES[theme]

    def box(x: int, y: int, width: int, height: int, fill: str, radius: int = 10) -> str:
        return (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" '
            f'stroke="{c["line"]}"/>'
        )

    def text(
        x: int, y: int, said: str, size: int = 14, colour: str = "ink", anchor: str = "middle", weight: int = 400
    ) -> str:
        return (
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{c[colour]}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{said}</text>'
        )

    def arrow(y: int, colour: str, first: str, second: str, *, up: bool) -> str:
        x1, x2 = (362, 626) if up else (634, 370)
        return (
            f'<path d="M{x1} {y}H{x2}" stroke="{c[colour]}" stroke-width="2.5" marker-end="url(#{colour})"/>'
            + text(498, y - 9, first, 14, colour, weight=600)
            + text(498, y + 18, second, 12, "soft")
        )

    def part(x: int, y: int, width: int, name: str, note: str) -> str:
        return (
            box(x, y, width, 56, c["inner"], 7)
            + text(x + width // 2, y + 25, name, 14)
            + text(x + width // 2, y + 44, note, 12, "soft")
        )

    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{c[name]}"/></marker>'
        for name in ("model", "data", "auxiliary")
    )
    clients = "".join(box(24 + 8 * back, 60 - 8 * back, 316, 268, c["card"]) for back in (2, 1, 0))
    pieces = [
        clients,
        text(44, 92, "Clients", 18, anchor="start", weight=650),
        text(320, 92, "each with its own data", 12, "soft", "end"),
        part(44, 110, 276, "data", "its inputs never leave"),
        part(44, 180, 132, "client part", "trained here"),
        part(188, 180, 132, "auxiliary", "frozen here"),
        text(44, 268, "The auxiliary estimates the gradient", 13, "soft", "start"),
        text(44, 287, "that the server would send back,", 13, "soft", "start"),
        text(44, 306, "so no client waits for it.", 13, "soft", "start"),
        box(640, 44, 296, 92, c["card"]),
        text(660, 76, "F-server", 18, anchor="start", weight=650),
        text(660, 100, "averages the client parts", 13, "soft", "start"),
        box(640, 172, 296, 172, c["card"]),
        text(660, 204, "S-server", 18, anchor="start", weight=650),
        part(660, 220, 124, "server part", "trained here"),
        part(792, 220, 124, "newest uploads", "of each client"),
        text(660, 304, "aligns the auxiliaries: matches their", 13, "soft", "start"),
        text(660, 323, "gradients to the server part's", 13, "soft", "start"),
        arrow(72, "model", "client part", "once a round", up=True),
        arrow(120, "model", "average", "once a round", up=False),
        arrow(222, "data", "smashed data, labels", "every q-th batch", up=True),
        arrow(292, "auxiliary", "aligned auxiliary", "every l-th round", up=False),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="8 30 944 328" width="944" height="328" role="img" '
        f'aria-labelledby="t" font-family="{FONT}"><title id="t">FSL-SAGE: three roles, and what travels between '
        f"them</title><defs>{heads}</defs>{''.join(pieces)}</svg>\n"
    )


def curve(run: Path, theme: str, out: Path) -> None:
    """Draw the headline score of every round against the bytes moved so far."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    c = THEMES[theme]
    written = json.loads((run / "config.json").read_text())
    config = written["config"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    moved = [line["bytes_paper"] / 2**30 for line in lines]
    scores = [100 * line["test_accuracy"] for line in lines]
    figure, axes = plt.subplots(figsize=(7.4, 3.3), dpi=160)
    axes.plot(moved, scores, color=c["model"], marker="o", linewidth=2.2, markersize=5)
    axes.annotate(
        f"{scores[-1]:.1f} %", (moved[-1], scores[-1]), (0, 9), textcoords="offset points", ha="right", color=c["ink"]
    )
    title = f"{config['algorithm']}, {config['model']['name']}, {config['clients']} clients, {len(lines)} rounds"
    axes.set_title(title, color=c["ink"], loc="left", fontsize=11)
    axes.set_xlabel("communication, GiB", color=c["soft"])
    axes.set_ylabel("test accuracy, %", color=c["soft"])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0, top=max(scores) * 1.14)
    axes.grid(color=c["line"], alpha=0.35, linewidth=0.7)
    axes.tick_params(colors=c["soft"])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(c["line"])
    figure.tight_layout()
    figure.savefig(out, transparent=True, metadata={"Software": None})
    plt.close(figure)


SHOWN = re.compile(r'src="([^"]*experiments/results/[^"]*\.png)"')


def shown_figures() -> list[Path]:
    """The figures of reports that pages show, without their dark twins."""
    pages = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [(page.parent / name).resolve() for page in pages for name in SHOWN.findall(page.read_text())]


def on_dark(pixels: np.ndarray) -> np.ndarray:
    """The same picture with light and dark exchanged, [H, W, 3] from 0 to 1; hues stay."""
    least, most = pixels.min(2, keepdims=True), pixels.max(2, keepdims=True)
    light, colour = (most + least) / 2, np.minimum(1, 2 * (most - least))
    wanted = (1 - colour) * (1 - light) + colour * np.maximum(light, 1 - light)  # what is coloured is never darkened
    turned = np.clip(pixels + wanted - light, 0, 1)
    ground, ink = (_rgb(THEMES["dark"][name]) for name in ("card", "ink"))
    return ground + turned * (ink - ground)


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])


def dark_name(figure: Path) -> Path:
    """Where the dark twin of a figure is."""
    return figure.with_name(f"{figure.stem}-dark.png")


def dark() -> None:
    """Write the dark twins of all figures of reports that pages show."""
    from PIL import Image

    for figure in shown_figures():
        pixels = np.asarray(Image.open(figure).convert("RGB")) / 255
        turned = Image.fromarray((on_dark(pixels) * 255).round().astype(np.uint8))
        turned.quantize(128).save(dark_name(figure), optimize=True)


def main() -> None:
    """Write the figures."""
    if sys.argv[1] == "dark":
        return dark()
    for theme in THEMES:
        if sys.argv[1] == "roles":
            (DOCS / f"roles-{theme}.svg").write_text(roles(theme))
        else:
            curve(Path(sys.argv[2]), theme, DOCS / f"default-run-{theme}.png")


if __name__ == "__main__":
    main()
