"""SplitFed-SS (SplitFedv2): one server-side model for all clients."""

from fsl_sage.algorithms.splitfed import SplitFed


class SplitFedSS(SplitFed):
    """The single server-side model takes a step on every upload, in the order of arrival."""

    title = "SplitFed-SS"
    colour = "#CC79A7"
    own_copy = False
