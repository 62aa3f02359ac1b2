"""The run directory: metrics, ledger, checkpoints, figures, trackers."""
