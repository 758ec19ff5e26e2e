"""Studies: settings for `horovod-topk compare` (*.toml), what they train, their pages (*.md)."""
