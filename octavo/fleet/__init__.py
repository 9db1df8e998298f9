"""Engine processes: start, supervision, replacement and routing, on one machine or several."""
