"""Workers: the data plane of one device."""
