"""Texts: where they come from, how they are kept, and the language models that learn to write them."""
