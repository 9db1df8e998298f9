"""Terminal interface: the chat of `octavo run` and `octavo chat`, and its commands."""
