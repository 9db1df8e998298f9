"""Pictures and sound in requests: reading, fetching and processing."""
