"""The bounded alignment dataset, gradient matching and fidelity."""
