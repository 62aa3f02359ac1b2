"""Images: where they come from, how they are kept, and their classification."""
