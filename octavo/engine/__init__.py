"""The engine: from requests to steps to outputs."""
