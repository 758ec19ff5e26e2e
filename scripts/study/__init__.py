"""The accuracy study behind docs/accuracy.md: which trials, their results on disk, the report."""
