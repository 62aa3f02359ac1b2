"""The bar that shows a download. It is not in `download`, because rich takes a tenth of a second to import."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn


def fetching_bar(counts_bytes: bool) -> Progress:
    """A bar on standard error; one that counts bytes shows how many there are and how fast they come."""
    described = TextColumn("[progress.description]{task.description}")
    bytes_columns = (DownloadColumn(), TransferSpeedColumn()) if counts_bytes else ()
    return Progress(described, BarColumn(), *bytes_columns, TimeElapsedColumn(), console=Console(stderr=True))
