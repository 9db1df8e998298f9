"""The operations that layers are made of: one table, a native and a plain torch implementation."""
