"""KV connectors: transfer of keys and values out of an engine and back into one."""
