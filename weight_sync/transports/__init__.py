"""The ways that the bytes of a push go, each with its two ends."""
