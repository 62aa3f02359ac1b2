"""Messages, the post that delivers them, and the ledger of bytes. Knows nothing of models."""
