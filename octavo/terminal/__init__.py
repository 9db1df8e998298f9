"""What people see in a terminal: the chat of `octavo run` and `octavo chat`, and its commands."""
